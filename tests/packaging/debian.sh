#!/bin/sh
# Unpack packages of Debian: debian.sh FOLDER ARCHITECTURE PACKAGE...
# Installs nothing, and changes nothing else on the machine. Needs apt and a network.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd) architecture=$2
shift 2
command -v apt-get >/dev/null || { echo "$0 needs apt-get, as Debian and Ubuntu have it" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial"
apt() {
    apt-get -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture" \
        -o "Dir::State::lists=$work/lists" -o Dir::State::status=/dev/null -o "Dir::Cache=$work" \
        -o APT::Sandbox::User=root -qq "$@"
}
apt update
cd "$work/archives"
apt download "$@"
for package in *.deb; do dpkg -x "$package" "$folder"; done
