//! Ids: of caches, and of what belongs to one.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;

/// A cache among all of a process. What a cache hands out carries it, so that another cache can refuse it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheId(u64);

impl CacheId {
    /// One that no other cache has: 64 bits of the standard library's randomness.
    pub(crate) fn unique() -> CacheId {
        CacheId(RandomState::new().hash_one(()))
    }
}

/// A sequence of a cache. An id is never used again after its sequence is removed, and no other cache takes
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(crate) number: u64,
    pub(crate) cache: CacheId,
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.number)
    }
}
