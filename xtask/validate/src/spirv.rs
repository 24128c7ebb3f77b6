//! SPIR-V and spirv-val.

use crate::Options;
use crate::kernels::Kernel;
use crate::report::Report;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::fetch;

const NAME: &str = "spirv-val";

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    let Some(program) = fetch::program_or_debian(&options.store, NAME, "spirv-tools", "usr/bin/spirv-val")
    else {
        return Report::skipped(NAME, "not found; apt-get install spirv-tools");
    };
    let version = fetch::first_line(Command::new(&program).arg("--version"));
    let mut errors = Vec::new();
    for (at, target) in ["vulkan1.3", "vulkan1.1"].into_iter().enumerate() {
        let files = match write(&options.store.folder.join("spirv").join(target), kernels, at) {
            Ok(files) => files,
            Err(error) => return Report::failed(NAME, error),
        };
        for (kernel, file) in kernels.iter().zip(&files) {
            match Command::new(&program).args(["--target-env", target]).arg(file).output() {
                Ok(output) if output.status.success() => {}
                Ok(output) => {
                    errors.push(format!(
                        "{}, {target}: {}",
                        kernel.name,
                        String::from_utf8_lossy(&output.stderr)
                    ));
                }
                Err(error) => errors.push(format!("{}: {error}", program.display())),
            }
        }
    }
    Report::ran(format!("{NAME} ({version})"), kernels.len(), errors)
}

/// Writes the modules of SPIR-V 1.6 (`version` = 0) or 1.3 (1); their files, in order.
pub fn write<'k>(
    folder: &Path,
    kernels: impl IntoIterator<Item = &'k Kernel>,
    version: usize,
) -> Result<Vec<PathBuf>, String> {
    fetch::empty(folder)?;
    kernels
        .into_iter()
        .map(|kernel| {
            let file = folder.join(fetch::file_name(&kernel.name, "spv"));
            let bytes: Vec<u8> = kernel.spirv[version].iter().flat_map(|w| w.to_le_bytes()).collect();
            std::fs::write(&file, bytes).map_err(|e| format!("{}: {e}", file.display()))?;
            Ok(file)
        })
        .collect()
}
