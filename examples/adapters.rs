//! Lists the adapters that wgpu finds, each with the index by which it can be chosen. Exits with 1 if there
//! is none.

#[path = "support/adapters.rs"]
mod adapters;

use kivi_wgpu::wgpu;

fn main() -> std::process::ExitCode {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let all = pollster::block_on(adapters::all(&instance));
    for (index, adapter) in all.iter().enumerate() {
        println!("{}", adapters::describe(index, adapter));
    }
    std::process::ExitCode::from(u8::from(all.is_empty()))
}
