//! Work that is divided among the cores.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Cores, or 1 if their number is not known.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// What `work` makes of every piece of `size` items, in the order of the items. A thread that is done takes
/// the next piece.
pub fn in_pieces<T: Sync, R: Send>(items: &[T], size: usize, work: impl Fn(&[T]) -> Vec<R> + Sync) -> Vec<R> {
    let pieces: Vec<&[T]> = items.chunks(size).collect();
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { return done };
            done.push((at, work(piece)));
        }
    };
    let mut done: Vec<(usize, Vec<R>)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads()).map(|_| scope.spawn(take)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("the work does not panic")).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().flat_map(|(_, results)| results).collect()
}
