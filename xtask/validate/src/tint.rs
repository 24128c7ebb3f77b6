//! Tint, which Chromium's browsers use, through Dawn's null backend.

use crate::Options;
use crate::kernels::Kernel;
use crate::report::Report;
use std::process::Command;
use xtask::fetch;

const NAME: &str = "Tint";
/// Dawn for Node.
const PACKAGE: &str = "webgpu@0.6.2";

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    let folder = options.store.folder.join(PACKAGE);
    if !fetch::has("node") {
        return Report::skipped(NAME, "Node is not found; apt-get install nodejs npm");
    }
    if let Err(error) = std::fs::create_dir_all(&folder) {
        return Report::failed(NAME, error.to_string());
    }
    if !folder.join("node_modules/webgpu").exists() {
        if options.store.fetch {
            eprintln!("fetching {PACKAGE} from npm ...");
            fetch::quietly(
                Command::new("npm")
                    .args(["install", "--no-save", "--ignore-scripts", PACKAGE])
                    .current_dir(&folder),
            );
        }
        if !folder.join("node_modules/webgpu").exists() {
            return Report::skipped(NAME, format!("npm could not fetch {PACKAGE}"));
        }
    }
    let wgsl = folder.join("wgsl");
    let written = fetch::empty(&wgsl).and_then(|()| {
        kernels.iter().try_for_each(|kernel| {
            std::fs::write(wgsl.join(fetch::file_name(&kernel.name, "wgsl")), &kernel.wgsl)
                .map_err(|e| e.to_string())
        })
    });
    let script = folder.join("check.mjs");
    let written =
        written.and_then(|()| std::fs::write(&script, include_str!("tint.mjs")).map_err(|e| e.to_string()));
    if let Err(error) = written {
        return Report::failed(NAME, error);
    }
    match Command::new("node").arg(&script).arg(&wgsl).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let mut errors: Vec<String> =
                text.split('\u{1}').map(str::to_string).filter(|e| !e.is_empty()).collect();
            // The last part counts what was checked, so a script that dies is no success.
            if errors.pop() != Some(format!("checked {}", kernels.len())) {
                errors.push(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
            }
            Report::ran(format!("{NAME} ({PACKAGE})"), kernels.len(), errors)
        }
        Err(error) => Report::failed(NAME, error.to_string()),
    }
}
