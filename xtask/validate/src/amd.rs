//! AMD's compiler, through the null device of Mesa's Vulkan driver: registers, spills and occupancy of a GPU
//! that is not there. wgpu cannot open that device, so this speaks Vulkan, in processes of its own: the
//! driver takes the GPU's name from the environment.

mod pipeline;

use crate::kernels::{Binding, Kernel};
use crate::parallel::threads;
use crate::report::Report;
use crate::{Options, repository, spirv};
use kivi_wgpu::Variant;
use pipeline::Device;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const NAME: &str = "AMD";
/// RDNA 3.
const FAMILY: &str = "gfx1100";
/// First argument of a worker's process; then jobs follow.
pub const WORKER: &str = "amd-worker";

/// What the compiler made of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Statistics {
    pub vgprs: u64,
    pub spilled: u64,
    pub lds: u64,
    pub subgroups: u64,
    pub instructions: u64,
}

/// A kernel for a worker.
pub struct Job {
    /// Index among the kernels.
    number: usize,
    file: PathBuf,
    entry_point: String,
    bindings: Vec<Binding>,
}

impl Job {
    /// One argument of a worker.
    fn write(&self) -> String {
        let mut text = format!("{}\t{}\t{}", self.number, self.file.display(), self.entry_point);
        for b in &self.bindings {
            let _ = write!(text, "\t{} {} {}", b.group, b.binding, u8::from(b.uniform));
        }
        text
    }

    fn read(text: &str) -> Option<Job> {
        let mut fields = text.split('\t');
        let number = fields.next()?.parse().ok()?;
        let (file, entry_point) = (fields.next()?.into(), fields.next()?.into());
        let binding = |field: &str| {
            let numbers: Vec<u32> = field.split(' ').filter_map(|n| n.parse().ok()).collect();
            let &[group, binding, uniform] = &numbers[..] else { return None };
            Some(Binding { group, binding, uniform: uniform == 1 })
        };
        let bindings = fields.map(binding).collect::<Option<_>>()?;
        Some(Job { number, file, entry_point, bindings })
    }
}

pub fn check(options: &Options, kernels: &[Kernel]) -> Report {
    let icds =
        ["radeon_icd.x86_64.json", "radeon_icd.json"].map(|f| Path::new("/usr/share/vulkan/icd.d").join(f));
    let Some(icd) = icds.into_iter().find(|f| f.exists()) else {
        return Report::skipped(NAME, "Mesa's RADV is not found; apt-get install mesa-vulkan-drivers");
    };
    let seen: Vec<&Kernel> =
        for_gpus(kernels).step_by(options.sample).chain(for_software(kernels, options)).collect();
    let files = match spirv::write(&options.store.folder.join("amd"), seen.iter().copied(), 0) {
        Ok(files) => files,
        Err(error) => return Report::failed(NAME, error),
    };
    let jobs: Vec<Job> = seen
        .iter()
        .zip(files)
        .enumerate()
        .map(|(number, (kernel, file))| Job {
            number,
            file,
            entry_point: kernel.entry_point.into(),
            bindings: kernel.bindings.clone(),
        })
        .collect();
    let mut errors = Vec::new();
    let (driver, statistics) = match run_workers(&icd, &seen, &jobs, &mut errors) {
        Ok(both) => both,
        Err(error) => return Report::failed(NAME, error),
    };
    for kernel in for_gpus(kernels) {
        if let Some(s) = statistics.get(&kernel.name).filter(|s| s.spilled > 0) {
            errors.push(format!("{}: {} registers are spilled", kernel.name, s.spilled));
        }
    }
    let mut report = Report::ran(format!("{NAME} {FAMILY} ({driver})"), seen.len(), errors);
    let file = record_file(&driver);
    let kept: Table =
        for_gpus(kernels).filter_map(|k| Some((k.name.clone(), *statistics.get(&k.name)?))).collect();
    if options.record {
        if report.errors.is_empty() {
            match std::fs::write(&file, recorded(&kept)) {
                Ok(()) => report.notes.push(format!("recorded in {}", file.display())),
                Err(error) => report.errors.push(error.to_string()),
            }
        }
    } else if file.exists() {
        compare(&file, &kept, &mut report.errors);
    } else {
        // Another version of the compiler may need other numbers of registers.
        report.left_out.push("registers not compared: none are recorded for this driver".into());
    }
    let (few, all) = (for_software(kernels, options).count(), kernels.len() - for_gpus(kernels).count());
    report.left_out.push(format!(
        "{few} of them, out of {all}, are made for software adapters: their registers are no error"
    ));
    if options.sample > 1 {
        report.left_out.push(format!("of the others only every {}th", options.sample));
    }
    let table = options.store.folder.join("amd.md");
    match std::fs::write(&table, whole_table(&statistics)) {
        Ok(()) => report.notes.push(format!("every kernel: {}", table.display())),
        Err(error) => report.errors.push(error.to_string()),
    }
    report.notes.extend(summary(&statistics));
    report
}

/// Kernels that the library could choose for a GPU.
fn for_gpus(kernels: &[Kernel]) -> impl Iterator<Item = &Kernel> {
    kernels.iter().filter(|k| k.variant != Variant::Subgroups)
}

/// A few of those that it never chooses for one. They are many, keep all of their state in registers, and
/// take this compiler ten times as long; their registers are neither recorded nor an error.
fn for_software<'k>(kernels: &'k [Kernel], options: &Options) -> impl Iterator<Item = &'k Kernel> {
    kernels.iter().filter(|k| k.variant == Variant::Subgroups).step_by(16 * options.sample)
}

type Table = BTreeMap<String, Statistics>;

/// Does all jobs in as many processes as there are cores.
fn run_workers(
    icd: &Path,
    kernels: &[&Kernel],
    jobs: &[Job],
    errors: &mut Vec<String>,
) -> Result<(String, Table), String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let threads = threads();
    let workers: Vec<_> = (0..threads)
        .map(|first| {
            Command::new(&program)
                .arg(WORKER)
                .args(jobs.iter().skip(first).step_by(threads).map(Job::write))
                .env("VK_ICD_FILENAMES", icd)
                .env("RADV_FORCE_FAMILY", FAMILY)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
        })
        .collect();
    let mut driver = String::new();
    let mut table = Table::new();
    let mut failures = String::new();
    for worker in workers {
        let output = worker.and_then(|w| w.wait_with_output()).map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines = text.lines();
        driver = lines.next().map_or(driver, str::to_string);
        for line in lines {
            let fields: Vec<u64> = line.split('\t').filter_map(|f| f.parse().ok()).collect();
            if let &[number, vgprs, spilled, lds, subgroups, instructions] = &fields[..]
                && let Some(kernel) = kernels.get(number as usize)
            {
                let s = Statistics { vgprs, spilled, lds, subgroups, instructions };
                table.insert(kernel.name.clone(), s);
            }
        }
        if !output.status.success() {
            let _ = writeln!(failures, "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    if driver.is_empty() {
        return Err(format!("the null device does not open: {}", failures.trim()));
    }
    for kernel in kernels.iter().filter(|k| !table.contains_key(&k.name)) {
        errors.push(format!("{}: not compiled. {}", kernel.name, failures.trim()));
    }
    Ok((driver, table))
}

/// Does the jobs that are its arguments: prints the driver, then a line of statistics for each.
pub fn worker(jobs: impl Iterator<Item = String>) -> ExitCode {
    let run = || -> Result<(), String> {
        let device = Device::open(FAMILY)?;
        println!("{}", device.driver());
        for line in jobs {
            let job = Job::read(&line).ok_or_else(|| format!("{line} is no job"))?;
            let s = device.compile(&job).map_err(|e| format!("{}: {e}", job.file.display()))?;
            let Statistics { vgprs, spilled, lds, subgroups, instructions } = s;
            println!("{}\t{vgprs}\t{spilled}\t{lds}\t{subgroups}\t{instructions}", job.number);
        }
        Ok(())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn record_file(driver: &str) -> PathBuf {
    let name = driver.to_lowercase().replace(' ', "-");
    repository().join("xtask/validate/registers").join(format!("{FAMILY}-{name}.txt"))
}

/// Registers and name of every kernel.
fn recorded(table: &Table) -> String {
    table.iter().fold(String::new(), |text, (name, s)| text + &format!("{} {name}\n", s.vgprs))
}

/// Errors for kernels that take more registers than the record allows.
fn compare(file: &Path, table: &Table, errors: &mut Vec<String>) {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return errors.push(format!("{}: {error}", file.display())),
    };
    let mut record: BTreeMap<&str, u64> = BTreeMap::new();
    for line in text.lines() {
        match line.split_once(' ').and_then(|(n, name)| Some((name, n.parse().ok()?))) {
            Some((name, registers)) => drop(record.insert(name, registers)),
            None => errors.push(format!("{}: {line:?} is no line of a record", file.display())),
        }
    }
    for (name, s) in table {
        match record.get(name.as_str()) {
            Some(allowed) if s.vgprs <= *allowed => {}
            Some(allowed) => errors.push(format!("{name}: {} registers, {allowed} are recorded", s.vgprs)),
            None => errors.push(format!("{name}: no registers are recorded; --record adds them")),
        }
    }
}

fn whole_table(table: &Table) -> String {
    let mut text = String::from(
        "| kernel | VGPRs | spilled | LDS, bytes | subgroups per SIMD | instructions |\n|---|---|---|---|---|---|\n",
    );
    for (name, s) in table {
        let Statistics { vgprs, spilled, lds, subgroups, instructions } = s;
        let _ = writeln!(text, "| {name} | {vgprs} | {spilled} | {lds} | {subgroups} | {instructions} |");
    }
    text
}

/// The extremes of each pass and variant.
fn summary(table: &Table) -> Vec<String> {
    let mut groups: BTreeMap<String, Vec<&Statistics>> = BTreeMap::new();
    for (name, s) in table {
        let mut parts = name.split('/');
        let group = format!("{} | {}", parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        groups.entry(group).or_default().push(s);
    }
    let mut lines = vec![
        "| pass | variant | kernels | VGPRs | spilled | subgroups per SIMD |".to_string(),
        "|---|---|---|---|---|---|".to_string(),
    ];
    for (group, all) in groups {
        let range = |of: fn(&Statistics) -> u64| {
            let (least, most) = (all.iter().map(|s| of(s)).min(), all.iter().map(|s| of(s)).max());
            format!("{}–{}", least.unwrap_or(0), most.unwrap_or(0))
        };
        let spilled: u64 = all.iter().map(|s| s.spilled).sum();
        let (vgprs, subgroups) = (range(|s| s.vgprs), range(|s| s.subgroups));
        lines.push(format!("| {group} | {} | {vgprs} | {spilled} | {subgroups} |", all.len()));
    }
    lines
}
