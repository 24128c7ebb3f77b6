//! Which cache something belongs to.

use std::collections::hash_map::RandomState;
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
