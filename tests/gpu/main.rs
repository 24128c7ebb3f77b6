//! The wgpu executor against the CPU oracle, on whatever adapter wgpu finds (`KIVI_ADAPTER` picks one by its
//! index or a part of its name).

mod attention;
mod faults;
mod inputs;
mod kernels;
mod layers;
mod life;
mod logits;
mod numbers;
mod pair;
mod programs;
mod real_data;
mod recorded;
#[path = "../reference/mod.rs"]
mod reference;
mod shaders;
mod snapshots;
mod steps;
mod support;
mod textbook;
mod variants;
mod words;
