"""URLs and files that a `RespTier` refuses before it asks a server."""

from __future__ import annotations

import pytest

from kvstow import ConfigError
from kvstow.tiers.resp import RespTier
from kvstow.transfer import HostArena

NAMESPACE = bytes(range(16))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:6379", "has no scheme"),
        ("http://127.0.0.1", "http://127.0.0.1 names no RESP servers"),
        ("redis://", "names no RESP servers"),
        ("redis://user:sesame@host", "the URL of host contains credentials"),
        ("redis://host:0", "must be 1 to 65535"),
        ("redis://host:99999", "has no valid port"),
        ("redis://host/one", "names database 'one'"),
        ("redis+cluster://host/1", "names database '1'"),
        ("redis+sentinel://host", "names no service"),
        ("redis://a,rediss://b", "differ in more than host and port"),
        ("redis://a,a", "name a server twice"),
        ("redis://host?x=1", "has options after the path"),
        ("unix:///run/kv.sock?db=3", "the URL of /run/kv.sock has options after the path"),
        ("unix:///run/kv.sock#1", "the URL of /run/kv.sock has options after the path"),
        ("unix://host/run/kv.sock", "unix://host names no RESP servers"),
        ("redis://a..b", "names the host 'a..b', and each part"),
        (f"redis+sentinel://{'x' * 64}/kv", "must have 1 to 63 characters"),
        ("redis://b,redis://\udce9", "the host .* must have 1 to 63 characters"),
        ("redis://ho\0st", "or a null character"),
        ("unix:///run/\0", "or a null character"),
    ],
)
def test_a_wrong_url_is_refused(arena: HostArena, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RespTier(arena, url, NAMESPACE)
    assert "sesame" not in str(refused.value)
