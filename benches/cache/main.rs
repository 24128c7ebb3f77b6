//! `cargo bench`: append, pack, decode and prefill. `benches/README.md` says how to read it.

mod device;
mod report;
mod workload;

use criterion::{Criterion, SamplingMode};
use device::Device;
use report::{Measurement, Report};
use std::time::Duration;
use workload::{Operation, Scheme, Shape, Workload};

/// What to run: all shapes if the command line filters, else a selection that takes minutes on a software
/// adapter.
fn selection(filtered: bool) -> Vec<(Operation, Shape)> {
    use Operation::{Append, Decode, Pack, Prefill};
    let shape = |head_dim, ratio, batch, context| Shape { head_dim, ratio, batch, context };
    if !filtered {
        let mut entries = vec![(Append, shape(128, 4, 1, 1024)), (Pack, shape(128, 4, 1, 1024))];
        entries.extend([1024, 4096, 32768].map(|context| (Decode, shape(128, 4, 1, context))));
        entries.push((Decode, shape(128, 4, 8, 4096)));
        entries.push((Decode, shape(64, 1, 1, 4096)));
        entries.push((Prefill, shape(64, 1, 1, 1024)));
        return entries;
    }
    let mut entries = Vec::new();
    for operation in [Append, Pack, Decode, Prefill] {
        for head_dim in [64, 128] {
            for ratio in [1, 4, 8] {
                for batch in [1, 4, 8] {
                    for context in [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131_072] {
                        // A pack or a prefill is of one sequence; what enters does not depend on the context.
                        let single = batch == 1 || matches!(operation, Append | Decode);
                        let short = context == 1024 || matches!(operation, Decode | Prefill);
                        if single && short {
                            entries.push((operation, shape(head_dim, ratio, batch, context)));
                        }
                    }
                }
            }
        }
    }
    entries
}

/// Whether the command line names benchmarks, which are its arguments that are neither options nor their
/// values.
fn has_filter(arguments: impl Iterator<Item = String>) -> bool {
    const FLAGS: [&str; 12] = [
        "--bench",
        "--test",
        "--list",
        "--quiet",
        "--verbose",
        "-v",
        "--noplot",
        "-n",
        "--exact",
        "--ignored",
        "--quick",
        "--discard-baseline",
    ];
    let mut value_follows = false;
    for argument in arguments {
        if std::mem::take(&mut value_follows) {
            continue;
        }
        if !argument.starts_with('-') {
            return true;
        }
        value_follows = !argument.contains('=') && !FLAGS.contains(&argument.as_str());
    }
    false
}

fn main() {
    let _ = env_logger::try_init();
    let device = Device::open();
    let mut report = Report::new(&device);
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .without_plots()
        .configure_from_args();
    let filtered = has_filter(std::env::args().skip(1));
    for (operation, shape) in selection(filtered) {
        let name = format!("{operation:?}").to_lowercase();
        let mut group = criterion.benchmark_group(format!("{name}/{}", shape.id()));
        group.sampling_mode(SamplingMode::Flat);
        // The same shape in the format that others are measured against, made when the first one that the
        // filter lets through needs it.
        let mut made: Option<(String, Workload)> = None;
        // Presets are measured where they are asked for, and in one shape.
        let presets = filtered || (shape.context, shape.batch, shape.head_dim) == (4096, 1, 128);
        for scheme in Scheme::all().into_iter().filter(|scheme| presets || scheme.is_plain()) {
            let mut times = Vec::new();
            let mut measured = None;
            group.bench_function(&scheme.name, |bencher| {
                if made.as_ref().is_none_or(|(name, _)| *name != scheme.against) {
                    made = None;
                    made = Some((scheme.against.clone(), Workload::new(&device, &shape, scheme.reference)));
                }
                let Some((_, reference)) = &mut made else { return };
                let own = measured.get_or_insert_with(|| Workload::forced(&device, &shape, scheme.format));
                device.warm_up();
                bencher.iter_custom(|iterations| {
                    let mut total = Duration::ZERO;
                    for _ in 0..iterations {
                        // Alternately, so that both meet the same machine.
                        let time = own.run(&device, operation);
                        times.push((time, reference.run(&device, operation)));
                        total += time;
                    }
                    total
                });
            });
            if let Some(own) = measured {
                report.add(Measurement::new(operation, shape, scheme, &own, times));
            }
        }
        group.finish();
    }
    report.finish(&device);
    criterion.final_summary();
}
