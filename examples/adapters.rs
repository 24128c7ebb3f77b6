//! Lists the adapters that wgpu finds. Exits with 1 if there is none.

use kivi_wgpu::wgpu;

fn main() -> std::process::ExitCode {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    for adapter in &adapters {
        let info = adapter.get_info();
        println!(
            "{} | {:?} | {:?} | {} {}",
            info.name, info.backend, info.device_type, info.driver, info.driver_info
        );
    }
    std::process::ExitCode::from(u8::from(adapters.is_empty()))
}
