//! One operation in several planners: each class of layers has its own, and all hold the same sequences by the same ids.

/// What `apply` returns of each class; if it fails in one, `undo` takes it back from those before.
pub(crate) fn all_or_none<C, T, E>(
    classes: &mut [C],
    mut apply: impl FnMut(&mut C) -> Result<T, E>,
    mut undo: impl FnMut(&mut C, T),
) -> Result<Vec<T>, E> {
    let mut done = Vec::with_capacity(classes.len());
    for at in 0..classes.len() {
        match apply(&mut classes[at]) {
            Ok(result) => done.push(result),
            Err(error) => {
                for (class, result) in classes.iter_mut().zip(done) {
                    undo(class, result);
                }
                return Err(error);
            }
        }
    }
    Ok(done)
}

/// What all classes have answered, which is the same: they have the same sequences and number operations alike.
pub(crate) fn the_same<T: PartialEq + std::fmt::Debug>(mut answers: Vec<T>) -> T {
    debug_assert!(answers.iter().all(|answer| *answer == answers[0]), "classes differ: {answers:?}");
    // There is a class, since there is a layer.
    answers.swap_remove(0)
}
