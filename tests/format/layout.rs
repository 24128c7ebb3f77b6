//! Where codes and parameters lie in a block, and blocks in slabs.

use kivi_wgpu::format::{Axis, BlockLayout, Tensor};
use kivi_wgpu::internals::plan::PoolLimits;
use kivi_wgpu::internals::schedule::{Bounds, TileLimits, Tiles};
use kivi_wgpu::{Bits, CacheConfig, Shape, TensorFormat};

#[test]
fn format_bits_of_common_choices() {
    let bits = |key: Bits, value: Bits, group: u32, head_dim: u32| {
        let config = CacheConfig::new(1, 8, 8, head_dim).with_bits(key, value).with_group_size(group);
        Shape::new(&config).unwrap().layout.format_bits()
    };
    assert_eq!(bits(Bits::Two, Bits::Two, 32, 128), 3.0);
    assert_eq!(bits(Bits::Two, Bits::Two, 64, 128), 2.5);
    assert_eq!(bits(Bits::Two, Bits::Two, 128, 128), 2.25);
    assert_eq!(bits(Bits::Three, Bits::Three, 32, 128), 4.0);
    assert_eq!(bits(Bits::Four, Bits::Four, 32, 128), 5.0);
    assert_eq!(bits(Bits::Four, Bits::Two, 32, 128), 4.0);
    // The last channel group of 80 is short: three parameters for 80 channels.
    assert!((bits(Bits::Two, Bits::Two, 32, 80) - (2.0 + (1.0 + 3.0 * 32.0 / 80.0) / 2.0)).abs() < 1e-12);
}

#[test]
fn slabs_stay_within_a_binding() {
    for (layers, query_heads, kv_heads, tokens) in
        [(32, 32, 32, 131_072), (80, 64, 8, 1_000_000), (32, 32, 32, 2_000_000), (1, 1, 1, 100)]
    {
        let config = CacheConfig::new(layers, query_heads, kv_heads, 128).with_capacity(tokens);
        let shape = Shape::new(&config).unwrap();
        let pool = PoolLimits::new(&shape, &config, 128 << 20).unwrap();
        let slabs = pool.slabs();
        assert_eq!(slabs.iter().sum::<u32>(), pool.pages);
        let bytes = |pages: u32| u64::from(pages) * shape.layout.page_words() * 4;
        assert!(slabs.iter().all(|pages| *pages > 0 && bytes(*pages) <= 128 << 20));
        let tiles = Tiles::new(&shape, &TileLimits::WGSL);
        let budget =
            Bounds { shape: &shape, tiles: &tiles, pool: pool.size() }.budget(128 << 20, 256).unwrap();
        assert!(budget.scratch_bytes <= 128 << 20);
    }
}

#[test]
fn block_regions_follow_each_other() {
    for head_dim in (8..=512).step_by(8) {
        for group in [16, 32, 64, 128] {
            let layout = BlockLayout {
                head_dim,
                kv_heads: 3,
                group,
                channel_group: group.min(head_dim),
                keys: TensorFormat::new(Bits::Two),
                values: TensorFormat::new(Bits::Four),
            };
            let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| layout.tensor(tensor));
            let key_words = (head_dim * 2).div_ceil(32) * group;
            assert_eq!(keys.first_param(), key_words);
            assert_eq!(values.code(0, 0), key_words + head_dim);
            let value_words = (group * 4 / 32) * head_dim;
            assert_eq!(values.first_param(), key_words + head_dim + value_words);
            let head = key_words + head_dim + value_words + group * head_dim.div_ceil(group.min(head_dim));
            assert_eq!(layout.block_words(), 3 * head);
            // Shaders read every region as vec4, whatever the axes and however parameters are stored.
            for (axes, compact) in (0..8).map(|i| ([i & 1 > 0, i & 2 > 0], i & 4 > 0)) {
                let format = |bits, per_token| {
                    let axis = if per_token { Axis::PerToken } else { Axis::PerChannel };
                    let format = TensorFormat::new(bits).with_axis(axis);
                    if compact { format.with_compact_parameters() } else { format }
                };
                let (keys, values) = (format(Bits::Three, axes[0]), format(Bits::Two, axes[1]));
                let layout = BlockLayout { keys, values, ..layout };
                let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| layout.tensor(tensor));
                for at in [keys.first_param(), values.code(0, 0), values.first_param(), layout.head_words()] {
                    assert_eq!(at % 4, 0, "head_dim {head_dim}, group {group}, {keys:?}, {values:?}");
                }
                assert_eq!(keys.first + keys.words(), values.first);
                assert_eq!(values.first + values.words(), layout.head_words());
                // Each parameter has a place of its own, and each element a group that knows it.
                let mut places = std::collections::BTreeSet::new();
                for tensor in [keys, values].into_iter().filter(|_| head_dim % 40 == 0) {
                    for param in 0..tensor.params() {
                        assert!(places.insert(tensor.param(param)));
                        assert!(tensor.elements(param).all(|(t, c)| tensor.group_of(t, c) == param));
                    }
                    let elements: usize = (0..tensor.params()).map(|p| tensor.elements(p).count()).sum();
                    assert_eq!(elements as u32, group * head_dim);
                }
            }
        }
    }
}
