//! Takes every kernel of the library's catalog through the compilers that run without a GPU: `cargo xtask
//! validate`.

mod amd;
mod dxc;
mod kernels;
mod metal;
mod parallel;
mod report;
mod spirv;
mod tint;

use kernels::Kernel;
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;
use xtask::fetch::Store;

const USAGE: &str = "\
cargo xtask validate [OPTIONS]
  --only NAME     only this compiler (naga always runs): spirv-val, dxc, metal, tint, amd; may be repeated
  --sample N      DXC and AMD's compiler, which are slow, see every Nth kernel
  --no-fetch      use only what is there already
  --require-all   fail if a compiler is skipped
  --record        write the registers that AMD's compiler uses to xtask/validate/registers/";

/// What the command line asks for.
pub struct Options {
    only: Vec<String>,
    sample: usize,
    record: bool,
    require_all: bool,
    store: Store,
}

impl Options {
    fn runs(&self, tool: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| o == tool)
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|a| a == amd::WORKER).is_some() {
        return amd::worker(arguments);
    }
    let result = options().and_then(|o| validate(&o));
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options, String> {
    use lexopt::prelude::*;
    let store = Store::default();
    let mut options = Options { only: Vec::new(), sample: 1, record: false, require_all: false, store };
    let mut parser = lexopt::Parser::from_env();
    let usage = |e: lexopt::Error| format!("{e}\n{USAGE}");
    while let Some(argument) = parser.next().map_err(usage)? {
        match argument {
            Long("only") => {
                let name = parser.value().and_then(|v| v.string()).map_err(usage)?;
                if !TOOLS.iter().any(|(tool, _)| *tool == name) {
                    return Err(format!("{name} is no compiler here\n{USAGE}"));
                }
                options.only.push(name);
            }
            Long("sample") => options.sample = parser.value().and_then(|v| v.parse()).map_err(usage)?,
            Long("no-fetch") => options.store.fetch = false,
            Long("record") => options.record = true,
            Long("require-all") => options.require_all = true,
            Long("help") => {
                println!("{USAGE}");
                std::process::exit(0);
            }
            other => return Err(format!("{}\n{USAGE}", other.unexpected())),
        }
    }
    if options.sample == 0 {
        return Err("--sample takes a number from 1 on".into());
    }
    if options.record && (options.sample > 1 || !options.runs("amd")) {
        return Err("--record needs AMD's compiler and every kernel".into());
    }
    Ok(options)
}

/// The root of the repository.
fn repository() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap_or(root)
}

type Check = fn(&Options, &[Kernel]) -> Report;
const TOOLS: [(&str, Check); 5] = [
    ("spirv-val", spirv::check),
    ("dxc", dxc::check),
    ("metal", metal::check),
    ("tint", tint::check),
    ("amd", amd::check),
];

/// Whether no compiler refused anything.
fn validate(options: &Options) -> Result<bool, String> {
    let folder = &options.store.folder;
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let (kernels, naga) = kernels::all();
    let mut reports = vec![naga];
    for (name, check) in TOOLS {
        if options.runs(name) {
            eprintln!("{name} ...");
            // A compiler that accepts everything checks nothing. But AMD's driver is no place for broken
            // modules.
            let control = (name != "amd").then(|| check(options, &[kernels::control()]));
            let mut report = check(options, &kernels);
            if report.skipped.is_none() && control.is_some_and(|c| c.kernels != 1 || c.errors.is_empty()) {
                report.errors.push("the control, which is wrong in every language, is not refused".into());
            }
            reports.push(report);
        }
    }
    Ok(report::print(&reports, options.require_all))
}
