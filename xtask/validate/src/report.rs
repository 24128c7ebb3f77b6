//! What a compiler said.

/// The outcome of one compiler.
pub struct Report {
    pub compiler: String,
    /// Why it did not run.
    pub skipped: Option<String>,
    pub kernels: usize,
    pub errors: Vec<String>,
    /// What it did not look at.
    pub left_out: Vec<String>,
    /// Lines for the reader, printed below the table.
    pub notes: Vec<String>,
}

impl Report {
    pub fn ran(compiler: impl Into<String>, kernels: usize, errors: Vec<String>) -> Report {
        let (left_out, notes) = (Vec::new(), Vec::new());
        Report { compiler: compiler.into(), skipped: None, kernels, errors, left_out, notes }
    }

    /// The compiler is not there.
    pub fn skipped(compiler: &str, why: impl Into<String>) -> Report {
        Report { skipped: Some(why.into()), ..Report::ran(compiler, 0, Vec::new()) }
    }

    /// The compiler is there and could not be used.
    pub fn failed(compiler: &str, error: impl Into<String>) -> Report {
        Report::ran(compiler, 0, vec![error.into()])
    }
}

/// Errors printed per compiler.
const SHOWN: usize = 5;

/// Prints the errors and the table; whether there are no errors and, with `all`, nothing was skipped.
pub fn print(reports: &[Report], all: bool) -> bool {
    for report in reports {
        for error in report.errors.iter().take(SHOWN) {
            println!("{}: {}\n", report.compiler, error.trim_end());
        }
        if report.errors.len() > SHOWN {
            println!("{}: {} more errors\n", report.compiler, report.errors.len() - SHOWN);
        }
    }
    println!("| compiler | kernels | result |\n|---|---|---|");
    let mut good = true;
    for report in reports {
        let Report { compiler, kernels, errors, left_out, .. } = report;
        if let Some(why) = &report.skipped {
            println!("| {compiler} | | skipped: {why} |");
            good &= !all;
            continue;
        }
        let result = if errors.is_empty() { "good".to_string() } else { format!("{} errors", errors.len()) };
        let left_out: String = left_out.iter().map(|what| format!("; {what}")).collect();
        println!("| {compiler} | {kernels} | {result}{left_out} |");
        good &= errors.is_empty();
    }
    println!("| FXC, Apple's compiler | | unverified: they run on Windows and macOS only |");
    for report in reports.iter().filter(|r| !r.notes.is_empty()) {
        println!("\n{}:", report.compiler);
        report.notes.iter().for_each(|note| println!("{note}"));
    }
    good
}
