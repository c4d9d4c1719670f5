//! Finds mistral.rs's block pool, which its crate does not export, in cargo's own copy of the crate.
//!
//! `cargo info mistralrs-core@0.8.1` downloads that copy. The crate as a dependency would compile an
//! inference engine.

use std::path::PathBuf;
use std::{env, fs};

const FOLDER: &str = "mistralrs-core-0.8.1/src/paged_attention";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(has_mistral)");
    println!("cargo::rerun-if-changed=build.rs");
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    let registries = home.and_then(|home| fs::read_dir(home.join("registry/src")).ok());
    let folder = registries
        .into_iter()
        .flatten()
        .filter_map(|registry| Some(registry.ok()?.path().join(FOLDER)))
        .find(|folder| folder.join("block_pool.rs").is_file());
    let Some(folder) = folder else {
        println!("cargo::warning=mistral.rs is left out: run cargo info mistralrs-core@0.8.1");
        return;
    };
    let modules = ["block_hash", "block_pool"].map(|name| {
        format!("#[path = {:?}]\npub mod {name};\n", folder.join(format!("{name}.rs")))
    });
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    fs::write(out.join("mistral.rs"), modules.concat()).unwrap();
    println!("cargo::rustc-cfg=has_mistral");
}
