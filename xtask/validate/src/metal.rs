//! MSL against a stub of Metal's standard library, by g++: names, arities and types. Apple's compiler runs on macOS only.

use crate::kernels::Kernel;
use crate::report::Report;
use crate::{Options, fetch};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const NAME: &str = "MSL syntax";

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    if !fetch::quietly(Command::new("g++").arg("--version")) {
        return Report::skipped(NAME, "g++ is not found");
    }
    let folder = options.folder.join("metal");
    let stub = fetch::empty(&folder).and_then(|()| {
        std::fs::write(folder.join("metal_stdlib"), include_str!("metal_stdlib.h"))
            .and_then(|()| std::fs::create_dir(folder.join("simd")))
            .and_then(|()| std::fs::write(folder.join("simd/simd.h"), ""))
            .map_err(|e| e.to_string())
    });
    if let Err(error) = stub {
        return Report::failed(NAME, error);
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let errors = std::thread::scope(|scope| {
        let folder = &folder;
        let parts: Vec<_> = kernels
            .chunks(kernels.len().div_ceil(threads).max(1))
            .map(|part| {
                scope.spawn(move || part.chunks(BATCH).flat_map(|b| compile(folder, b)).collect::<Vec<_>>())
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().expect("no panic")).collect()
    });
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
