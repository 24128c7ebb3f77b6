//! MSL against a stub of Metal's standard library, by g++: names, arities and types. Apple's compiler runs on
//! macOS only.

use crate::Options;
use crate::kernels::Kernel;
use crate::parallel::in_pieces;
use crate::report::Report;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use xtask::fetch;

const NAME: &str = "MSL syntax";

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    if !fetch::has("g++") {
        return Report::skipped(NAME, "g++ is not found");
    }
    let folder = options.store.folder.join("metal");
    let stub = fetch::empty(&folder).and_then(|()| {
        std::fs::write(folder.join("metal_stdlib"), include_str!("metal_stdlib.h"))
            .and_then(|()| std::fs::create_dir(folder.join("simd")))
            .and_then(|()| std::fs::write(folder.join("simd/simd.h"), ""))
            .map_err(|e| e.to_string())
    });
    if let Err(error) = stub {
        return Report::failed(NAME, error);
    }
    let errors = in_pieces(kernels, BATCH, |piece| compile(&folder, piece));
    let version = fetch::first_line(Command::new("g++").arg("--version"));
    Report::ran(format!("{NAME} ({version})"), kernels.len(), errors)
}

/// Kernels in one file, each in a namespace: starting the compiler takes longer than a kernel.
const BATCH: usize = 32;

fn compile(folder: &Path, kernels: &[Kernel]) -> Vec<String> {
    let Some(first) = kernels.first() else { return Vec::new() };
    let mut text = String::from("#include <metal_stdlib>\n");
    for (i, kernel) in kernels.iter().enumerate() {
        let _ = writeln!(text, "namespace kernel_{i} {{\n#line 1 \"{}\"", kernel.name);
        text.push_str(&kernel.msl);
        text.push_str("\n}\n");
    }
    let file = folder.join(fetch::file_name(&first.name, "cpp"));
    if let Err(error) = std::fs::write(&file, text) {
        return vec![error.to_string()];
    }
    let output = Command::new("g++")
        .args(["-std=c++17", "-fsyntax-only", "-fsingle-precision-constant", "-w", "-fmax-errors=3", "-I"])
        .arg(folder)
        .arg(&file)
        .output();
    match output {
        Ok(output) if output.status.success() => Vec::new(),
        Ok(output) => vec![String::from_utf8_lossy(&output.stderr).into_owned()],
        Err(error) => vec![error.to_string()],
    }
}
