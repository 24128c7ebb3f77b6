//! Which adapter to run on: one that a user names, by its index or a part of its name, or wgpu's choice.

use kivi_wgpu::wgpu;

/// All adapters, in the order of their indices.
pub async fn all(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    instance.enumerate_adapters(wgpu::Backends::all()).await
}

/// An adapter in a line, its index first.
pub fn describe(index: usize, adapter: &wgpu::Adapter) -> String {
    let info = adapter.get_info();
    let (kind, backend) = (info.device_type, info.backend);
    format!("{index} | {} | {backend:?} | {kind:?} | {} {}", info.name, info.driver, info.driver_info)
}

/// The adapter that `wanted` or else the environment's `KIVI_ADAPTER` names; without either, the one that
/// wgpu prefers.
#[allow(dead_code)]
pub async fn choose(instance: &wgpu::Instance, wanted: Option<&str>) -> Result<wgpu::Adapter, String> {
    let environment = std::env::var("KIVI_ADAPTER").ok().filter(|name| !name.is_empty());
    let Some(wanted) = wanted.or(environment.as_deref()) else {
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        return instance.request_adapter(&options).await.map_err(|error| {
            format!("wgpu finds no adapter ({error}): `cargo xtask demo` installs a software one on Debian and Ubuntu")
        });
    };
    let mut adapters = all(instance).await;
    let names: Vec<String> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
    match index_of(&names, wanted) {
        Some(index) => Ok(adapters.swap_remove(index)),
        None => {
            let lines = adapters.iter().enumerate().map(|(index, adapter)| describe(index, adapter));
            let lines: Vec<String> = lines.collect();
            Err(format!(
                "no adapter has the index or a name like {wanted:?}; there are:\n{}",
                lines.join("\n")
            ))
        }
    }
}

/// The adapter that has this index, or the first whose name contains this. An index tells adapters of the
/// same name apart.
pub fn index_of(names: &[String], wanted: &str) -> Option<usize> {
    let index = wanted.parse().ok().filter(|index| *index < names.len());
    index.or_else(|| names.iter().position(|name| name.to_lowercase().contains(&wanted.to_lowercase())))
}
