//! Adapters: what wgpu finds, and software ones for machines without a GPU.

use crate::{cargo, run};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xtask::fetch::{self, Store, has};

/// Makes sure that wgpu finds an adapter.
pub fn ensure() -> Result<(), String> {
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

/// The driver file of SwiftShader, a second software Vulkan: that of an installed Chromium, or out of
/// Debian's package, unpacked into the target folder.
pub fn swiftshader() -> Result<PathBuf, String> {
    const PACKAGE: &str = "chromium-common";
    const FILE: &str = "usr/lib/chromium/vk_swiftshader_icd.json";
    let installed = Path::new("/").join(FILE);
    if installed.exists() {
        return Ok(installed);
    }
    let fetched = fetch::debian_file(&Store::default(), PACKAGE, FILE)
        .ok_or_else(|| format!("SwiftShader comes with Debian's {PACKAGE}, which cannot be fetched here"))?;
    fetched.canonicalize().map_err(|e| format!("{}: {e}", fetched.display()))
}
