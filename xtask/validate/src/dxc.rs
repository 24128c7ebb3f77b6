//! HLSL and DXC, as wgpu compiles for DX12. Shader model 6.0 is the least that DXC knows; 6.6 brings integer
//! dot products of its own.

use crate::Options;
use crate::kernels::Kernel;
use crate::parallel::in_pieces;
use crate::report::Report;
use hassle_rs::{Dxc, DxcCompiler, DxcLibrary};
use xtask::fetch;

const NAME: &str = "DXC";
/// The only build of DXC for Linux on PyPI.
const WHEEL: &str = "compushady-lrtu==0.18.0";
const SHA256: &str = "b76371972f2543a1e83034a86c83cfad678dabf66be0b50b7d78edbcb1c98243";
const PROFILES: [&str; 2] = ["cs_6_0", "cs_6_6"];

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    let path = "compushady/backends/libdxcompiler_x86_64.so";
    let Some(library) = fetch::wheel_file(&options.store, WHEEL, SHA256, path) else {
        return Report::skipped(
            NAME,
            format!("not found; needs Linux on x86-64, and python3 with pip to fetch {WHEEL}"),
        );
    };
    let dxc = match Dxc::new(Some(library)) {
        Ok(dxc) => dxc,
        Err(error) => return Report::failed(NAME, error.to_string()),
    };
    let seen: Vec<&Kernel> = kernels.iter().step_by(options.sample).collect();
    let errors = in_pieces(&seen, 8, |piece| compile_all(&dxc, piece));
    let mut report = Report::ran(format!("{NAME} ({WHEEL}), {}", PROFILES.join(" and ")), seen.len(), errors);
    if options.sample > 1 {
        report.left_out.push(format!("only every {}th", options.sample));
    }
    // Shader model 6.2 has 16-bit types: a kernel that uses them has to be compiled for it.
    if seen.iter().any(|k| k.wgsl.contains("enable f16")) {
        report.errors.push("a kernel uses 16-bit types, and is not compiled for cs_6_2".into());
    }
    report
}

/// Their errors, from a compiler of their own.
fn compile_all(dxc: &Dxc, kernels: &[&Kernel]) -> Vec<String> {
    let (compiler, library) = match dxc.create_compiler().and_then(|c| Ok((c, dxc.create_library()?))) {
        Ok(both) => both,
        Err(error) => return vec![error.to_string()],
    };
    let mut errors = Vec::new();
    for kernel in kernels {
        for (text, profile) in kernel.hlsl.iter().zip(PROFILES) {
            if let Err(error) = compile(&compiler, &library, kernel, text, profile) {
                errors.push(format!("{}, {profile}: {error}", kernel.name));
            }
        }
    }
    errors
}

fn compile(
    compiler: &DxcCompiler,
    library: &DxcLibrary,
    kernel: &Kernel,
    text: &str,
    profile: &str,
) -> Result<(), String> {
    let blob = library.create_blob_with_encoding_from_str(text).map_err(|e| e.to_string())?;
    let name = format!("{}.hlsl", kernel.name);
    // As wgpu; -O3 is its default.
    let arguments = ["-HV", "2018", "-Ges", "-no-warnings"];
    compiler.compile(&blob, &name, kernel.entry_point, profile, &arguments, None, &[]).map(drop).map_err(
        |(result, _)| {
            let message = result.get_error_buffer().and_then(|b| library.get_blob_as_string(&b.into()));
            message.unwrap_or_else(|e| e.to_string())
        },
    )
}
