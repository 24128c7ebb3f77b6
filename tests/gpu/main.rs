//! The wgpu executor against the CPU oracle, on whatever adapter wgpu finds (`KIVI_ADAPTER` picks one by a part of its name).

mod attention;
mod inputs;
mod real_data;
mod shaders;
mod steps;
mod support;
mod variants;
mod words;
