//! The project's commands: see `USAGE`.

mod adapter;
mod model;
mod widths;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

const USAGE: &str = "\
cargo xtask demo [OPTIONS OF THE QUICKSTART]   run examples/quickstart.rs
cargo xtask test [OPTIONS] [FILTER]            run all tests of the library
  --llama                 those of examples/llama instead, with its model if it can be fetched
  --adapter NAME          on the adapter with the index NAME, or the first whose name contains it (they are
                          listed by `cargo run --example adapters`);
                          swiftshader is fetched from Debian's Chromium if need be
  --no-optional-features  on a device with WebGPU's defaults only
cargo xtask model [FILE]                       fetch the model of examples/llama, or make FILE (GGUF, llama or qwen2) its model
cargo xtask widths                             list comments and documents with lines of more than 110 columns
cargo xtask validate [OPTIONS]                 take every kernel through the vendors' compilers; --help lists the options

Demo and test need an adapter that wgpu can use. On Debian and Ubuntu they install Mesa's software Vulkan driver if there is none.";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let result = match command.as_str() {
        "demo" => adapter::ensure().and_then(|()| demo(&rest)),
        "test" => test(rest),
        "widths" if rest.is_empty() => widths::check(),
        "model" if rest.len() <= 1 => model::choose(rest.first().map(String::as_str)).map(|path| {
            println!("the model is {}; try `cargo run --release -p llama -- generate`", path.display())
        }),
        "validate" => run(cargo().args(["run", "--quiet", "--package", "validate", "--"]).args(rest)),
        _ => Err(USAGE.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &[String]) -> Result<(), String> {
    run(cargo().args(["run", "--quiet", "--example", "quickstart", "--"]).args(args))
}

fn test(mut args: Vec<String>) -> Result<(), String> {
    let mut command = cargo();
    if let Some(at) = args.iter().position(|a| a == "--no-optional-features") {
        command.env("KIVI_OPTIONAL_FEATURES", "0");
        args.remove(at);
    }
    if let Some(at) = args.iter().position(|a| a == "--adapter") {
        if at + 1 >= args.len() {
            return Err(USAGE.to_string());
        }
        let name = args.remove(at + 1);
        args.remove(at);
        if name.eq_ignore_ascii_case("swiftshader") && cfg!(target_os = "linux") {
            command.env("VK_ICD_FILENAMES", adapter::swiftshader()?);
        } else {
            adapter::ensure()?;
        }
        command.env("KIVI_ADAPTER", name);
    } else {
        adapter::ensure()?;
    }
    if let Some(packages) = python_packages() {
        command.env("PYTHONPATH", packages);
    }
    command.arg("test");
    if let Some(at) = args.iter().position(|a| a == "--llama") {
        args.remove(at);
        if let Err(error) = model::fetch() {
            eprintln!("{error}\nthe tests that need the model are skipped by name");
        }
        // A package's tests run in its own folder.
        if let Some(target) = std::env::var_os("CARGO_TARGET_DIR") {
            let here = std::env::current_dir().map_err(|e| e.to_string())?;
            command.env("CARGO_TARGET_DIR", here.join(target));
        }
        command.args(["--package", "llama"]);
    }
    // Without a package these are the library's. The tools in the workspace have no tests, and much to
    // compile.
    run(command.args(args))
}

/// A folder with what the scripts import that read and write files of saved sequences, for the tests that run
/// them; without Python or its packages these tests are skipped by name.
fn python_packages() -> Option<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let folder = std::env::current_dir().ok()?.join(target).join("python");
    let works = |folder: &PathBuf| {
        let mut probe = Command::new("python3");
        let probe = probe.args(["-c", "import numpy, safetensors"]).env("PYTHONPATH", folder).output();
        probe.is_ok_and(|output| output.status.success())
    };
    if !works(&folder) {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]);
        // It may say no, on a machine without a network for example.
        let _ = pip.arg(&folder).args(["numpy", "safetensors"]).output();
    }
    works(&folder).then_some(folder)
}

/// The cargo that runs this program.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    // Without a desktop session, Mesa's drivers complain that this is missing, several times.
    if cfg!(target_os = "linux") && std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
    }
    command
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed: {status}", command.get_program().to_string_lossy())),
        Err(error) => Err(format!("{}: {error}", command.get_program().to_string_lossy())),
    }
}
