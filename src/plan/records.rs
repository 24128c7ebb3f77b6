//! The records of plans and schedules, as kernels read them: structs of `u32`, without padding.

/// A struct of `u32` fields that shaders read by name: their twin is generated from [`Record::NAME`] and
/// [`Record::FIELDS`].
pub trait Record: bytemuck::Pod {
    /// Name of the struct.
    const NAME: &'static str;
    /// Names of its fields in order, each a `u32`.
    const FIELDS: &'static [&'static str];
    /// Words of a record.
    const WORDS: u32 = (size_of::<Self>() / 4) as u32;
}

/// Defines records.
macro_rules! records {
    ($($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name {
            $($(#[$about])* pub $field: $type,)*
        }

        impl $crate::plan::Record for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
        }

        // Every field is one word.
        const _: () = assert!(size_of::<$name>() == 4 * <$name as $crate::plan::Record>::FIELDS.len());)*
    };
}
pub(crate) use records;

/// Where an unpacked token lies: a row of the layer's sink slots and rings, or of the staging buffer.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Slot(u32);

impl Slot {
    /// Set in the words of slots in the staging buffer.
    pub const STAGING_BIT: u32 = 1 << 31;

    /// Row `index` of the sink slots and rings.
    pub fn ring(index: u32) -> Slot {
        Slot(index)
    }

    /// Row `index` of the staging buffer.
    pub fn staging(index: u32) -> Slot {
        Slot(index | Slot::STAGING_BIT)
    }

    /// Whether the token is in the staging buffer.
    pub fn is_staging(self) -> bool {
        self.0 & Slot::STAGING_BIT != 0
    }

    /// Row within its buffer.
    pub fn index(self) -> u32 {
        self.0 & !Slot::STAGING_BIT
    }

    /// The word that shaders read.
    pub fn word(self) -> u32 {
        self.0
    }
}

records! {
    /// A new token enters the cache.
    TokenWrite {
        /// Row of the step's keys and values.
        row: u32,
        /// Where it is kept.
        slot: Slot,
    }

    /// As many unpacked tokens as a group has become one block.
    PackBlock {
        /// Index in [`Plan::slots`](super::Plan::slots) of the block's first token; the others follow.
        first_slot: u32,
        /// Index of the block within its slab.
        block: u32,
    }

    /// An unpacked token is copied, within the sink slots and rings.
    TokenCopy {
        /// Where it is.
        source: Slot,
        /// Where it is wanted too. No copy of the same plan reads this slot.
        destination: Slot,
    }

    /// A block is copied to another page.
    BlockCopy {
        /// Index of the block within its slab.
        source: u32,
        /// Index of the copy within its slab. No copy of the same plan reads it.
        destination: u32,
    }

    /// A packed token returns to the window: dequantized, then through the entry function.
    TokenUnpack {
        /// Index of the block within its slab.
        block: u32,
        /// Index of the token within the block.
        token: u32,
        /// Where it is kept from now on.
        slot: Slot,
    }
}
