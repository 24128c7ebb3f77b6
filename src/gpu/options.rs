//! Choices that concern the device and not the content of a cache.

use super::kernels::{Kernels, Variant};

/// How much of its kernels a cache tries out as it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SelfTest {
    /// The words of a block, and attention through every kernel that the configuration can run. It builds all
    /// attention kernels.
    #[default]
    Full,
    /// The words of a block: kernels that attend are built by the first step that needs them, and trusted.
    /// For a device and a configuration on which the full test has passed, and for many caches on one device.
    Words,
}

/// Choices that concern the device and not the content of the cache.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct KvCacheOptions<'a> {
    /// Kernels of the device that are shared with other caches; `None`: some of its own.
    pub kernels: Option<&'a Kernels>,
    /// The attention kernels to run; `None`: what suits the device, see
    /// [`KvCache::variant`](crate::KvCache::variant).
    pub variant: Option<Variant>,
    /// What is tried out on the device at construction. Default: everything.
    pub self_test: SelfTest,
    /// Bytes that the cache's GPU buffers may take. Default `None`: as many as the device has. Beyond it,
    /// growing fails as it does where the device has no memory left.
    pub memory_limit: Option<u64>,
}

impl<'a> KvCacheOptions<'a> {
    /// Shares kernels with other caches on the device.
    #[must_use]
    pub fn with_kernels(mut self, kernels: &'a Kernels) -> Self {
        self.kernels = Some(kernels);
        self
    }

    /// Runs this variant of the attention kernels.
    #[must_use]
    pub fn with_variant(mut self, variant: Variant) -> Self {
        self.variant = Some(variant);
        self
    }

    /// Tries out so much at construction.
    #[must_use]
    pub fn with_self_test(mut self, self_test: SelfTest) -> Self {
        self.self_test = self_test;
        self
    }

    /// Allows the cache's GPU buffers so many bytes.
    #[must_use]
    pub fn with_memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }
}
