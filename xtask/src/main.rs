//! `cargo xtask demo` and `cargo xtask test`: make sure that wgpu finds an adapter, then run.

use std::process::{Command, ExitCode, Stdio};

const USAGE: &str = "\
cargo xtask demo [OPTIONS OF THE QUICKSTART]   run examples/quickstart.rs
cargo xtask test [--adapter NAME] [FILTER]     run all tests, on the adapter whose name contains NAME

Both need an adapter that wgpu can use. On Debian and Ubuntu they install Mesa's software Vulkan driver if there is none.";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let result = match command.as_str() {
        "demo" => ensure_adapter().and_then(|()| demo(&rest)),
        "test" => ensure_adapter().and_then(|()| test(rest)),
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
    if let Some(at) = args.iter().position(|a| a == "--adapter") {
        if at + 1 >= args.len() {
            return Err(USAGE.to_string());
        }
        command.env("KIVI_ADAPTER", args.remove(at + 1));
        args.remove(at);
    }
    run(command.args(["test", "--workspace"]).args(args))
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

fn ensure_adapter() -> Result<(), String> {
    println!("Looking for an adapter (the first build takes a few minutes) ...");
    run(cargo().args(["build", "--quiet", "--example", "adapters"]))?;
    if let Some(adapters) = adapters() {
        print!("{adapters}");
        return Ok(());
    }
    if !cfg!(target_os = "linux") {
        return Err("wgpu finds no adapter. On macOS and Windows the system's own driver should be found: is this a \
                    virtual machine without a GPU? On Windows, installing the Graphics Tools feature brings WARP."
            .into());
    }
    install_software_driver()?;
    match adapters() {
        Some(adapters) => {
            print!("{adapters}");
            Ok(())
        }
        None => Err("Mesa's driver is installed and wgpu still finds no adapter. VK_LOADER_DEBUG=all shows what the Vulkan \
                     loader tries; VK_ICD_FILENAMES, if set, may hide the driver."
            .into()),
    }
}

/// What examples/adapters.rs prints, if it finds any.
fn adapters() -> Option<String> {
    let output = cargo()
        .args(["run", "--quiet", "--example", "adapters"])
        .stderr(Stdio::null())
        .output()
        .ok()
        .filter(|o| o.status.success())?;
    String::from_utf8(output.stdout).ok()
}

fn install_software_driver() -> Result<(), String> {
    let has = |program: &str| {
        let probe =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        probe.is_ok_and(|s| s.success())
    };
    if !has("apt-get") {
        return Err("wgpu finds no adapter. Install a Vulkan driver for your GPU, or Mesa's software one: \
                    `dnf install mesa-vulkan-drivers` (Fedora), `pacman -S vulkan-swrast vulkan-icd-loader` (Arch), \
                    `apk add mesa-vulkan-swrast vulkan-loader` (Alpine)."
            .into());
    }
    // apt-get knows by itself whether it may: only root can write its lock.
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.trim_ascii() == b"0");
    if !root && !has("sudo") {
        return Err("wgpu finds no adapter. Run as root: apt-get install mesa-vulkan-drivers".into());
    }
    println!(
        "wgpu finds no adapter: installing Mesa's software Vulkan driver (mesa-vulkan-drivers) with apt-get."
    );
    let apt = || {
        let mut command = Command::new(if root { "apt-get" } else { "sudo" });
        if !root {
            command.arg("apt-get");
        }
        command.env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command
    };
    run(apt().arg("update"))?;
    run(apt().args(["install", "-y", "--no-install-recommends", "mesa-vulkan-drivers"]))
}
