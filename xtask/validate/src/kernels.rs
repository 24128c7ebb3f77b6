//! The catalog in the languages that compilers read.

use crate::parallel::in_pieces;
use crate::report::Report;
use kivi_wgpu::internals::gpu::{CatalogEntry, catalog};
use kivi_wgpu::{Variant, wgpu};
use naga::back::{hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use std::collections::HashSet;

/// A kernel that differs from all others, by the name of the first entry of the catalog that has it.
pub struct Kernel {
    pub name: String,
    pub entry_point: &'static str,
    /// As browsers get it.
    pub wgsl: String,
    /// SPIR-V 1.6, as wgpu writes it for Vulkan 1.3, and 1.3, for drivers without checks of buffers and
    /// integer dot products.
    pub spirv: [Vec<u32>; 2],
    /// For shader models 6.0 and 6.6.
    pub hlsl: [String; 2],
    pub msl: String,
    pub variant: Variant,
    pub bindings: Vec<Binding>,
}

/// A buffer that a kernel declares.
#[derive(Clone, Copy)]
pub struct Binding {
    pub group: u32,
    pub binding: u32,
    pub uniform: bool,
}

/// A kernel that every compiler refuses: a barrier in divergent flow for Tint, and for the others what is no
/// kernel at all.
pub fn control() -> Kernel {
    let wgsl = "
@compute @workgroup_size(64)
fn control(@builtin(local_invocation_index) local: u32) {
    if (local < 7u) {
        workgroupBarrier();
    }
}
";
    Kernel {
        name: "control".into(),
        entry_point: "control",
        wgsl: wgsl.into(),
        // A header and an instruction that reaches past the end.
        spirv: [
            vec![0x0723_0203, 0x0001_0600, 0, 8, 0, 0x0004_0011],
            vec![0x0723_0203, 0x0001_0300, 0, 8, 0, 0x0004_0011],
        ],
        hlsl: ["void control() { undeclared(1); }".into(), "void control() { undeclared(1); }".into()],
        msl: "kernel void control() { metal::undeclared(1.0); }".into(),
        variant: Variant::Portable,
        bindings: Vec::new(),
    }
}

/// Every kernel once, and what naga says of the catalog.
pub fn all() -> (Vec<Kernel>, Report) {
    let entries = catalog();
    let lowered = in_pieces(&entries, 32, |piece| piece.iter().map(lower).collect());
    let mut seen = HashSet::new();
    let mut kernels = Vec::new();
    let mut errors = Vec::new();
    for result in lowered {
        match result {
            Ok((kernel, used)) => {
                if seen.insert(used) {
                    kernels.push(kernel);
                }
            }
            Err(error) => errors.push(error),
        }
    }
    let mut report = Report::ran("naga 30", entries.len(), errors);
    report.notes.push(format!("{} kernels are different; the compilers below see these", kernels.len()));
    (kernels, report)
}

/// A kernel, and the SPIR-V of what it uses: its constants and functions that it does not are gone.
fn lower(entry: &CatalogEntry) -> Result<(Kernel, Vec<u32>), String> {
    let text = entry.source.text();
    let say = |what: String| format!("{}: {what}", entry.name);
    let module = naga::front::wgsl::parse_str(text).map_err(|e| say(e.emit_to_string(text)))?;
    let mut capabilities = naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let subgroups = entry.variant.features().contains(wgpu::Features::SUBGROUP);
    if subgroups {
        capabilities |= naga::valid::Capabilities::SUBGROUP;
    }
    let mut validator = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities);
    validator.subgroup_stages(naga::valid::ShaderStages::COMPUTE);
    validator.subgroup_operations(naga::valid::SubgroupOperationSet::all());
    let info = validator.validate(&module).map_err(|e| say(e.emit_to_string(text)))?;

    let mut compact = module.clone();
    // naga keeps every constant that has a name.
    compact.constants.iter_mut().for_each(|(_, constant)| constant.name = None);
    naga::compact::compact(&mut compact, naga::compact::KeepUnused::No);
    let compact_info = validator.validate(&compact).map_err(|e| say(e.to_string()))?;
    let entry_point = entry.entry_point;

    // As wgpu's backends ask for them.
    let checks = BoundsCheckPolicies {
        index: BoundsCheckPolicy::Restrict,
        buffer: BoundsCheckPolicy::Restrict,
        image_load: BoundsCheckPolicy::Restrict,
        binding_array: BoundsCheckPolicy::Unchecked,
    };
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::empty(),
        // wgpu turns these off where the driver checks buffers.
        bounds_check_policies: BoundsCheckPolicies { buffer: BoundsCheckPolicy::Unchecked, ..checks },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        ..Default::default()
    };
    let at =
        spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: entry_point.into() };
    let write = |module: &naga::Module, info: &_, options: &spv::Options| {
        spv::write_vec(module, info, options, Some(&at)).map_err(|e| say(e.to_string()))
    };
    let used = write(&compact, &compact_info, &options)?;
    let new = write(&module, &info, &options)?;
    let mut plain = vec![spv::Capability::Shader];
    if subgroups {
        use spv::Capability::{GroupNonUniform, GroupNonUniformShuffle, GroupNonUniformShuffleRelative};
        plain.extend([GroupNonUniform, GroupNonUniformShuffle, GroupNonUniformShuffleRelative]);
    }
    let old = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: checks,
        capabilities: Some(plain.into_iter().collect()),
        ..options
    };
    let spirv = [new, write(&module, &info, &old)?];

    let hlsl = |shader_model| {
        let options =
            hlsl::Options { shader_model, zero_initialize_workgroup_memory: false, ..Default::default() };
        let mut text = String::new();
        hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
            .write(&module, &info, None)
            .map_err(|e| say(e.to_string()))?;
        Ok::<_, String>(text)
    };
    let hlsl = [hlsl(hlsl::ShaderModel::V6_0)?, hlsl(hlsl::ShaderModel::V6_6)?];

    let options = msl::Options {
        lang_version: (3, 0),
        bounds_check_policies: checks,
        zero_initialize_workgroup_memory: false,
        ..Default::default()
    };
    let (msl, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
        .map_err(|e| say(e.to_string()))?;
    let bindings = module
        .global_variables
        .iter()
        .filter_map(|(_, variable)| {
            let naga::ResourceBinding { group, binding } = variable.binding?;
            Some(Binding { group, binding, uniform: variable.space == naga::AddressSpace::Uniform })
        })
        .collect();
    let kernel = Kernel {
        name: entry.name.clone(),
        entry_point,
        wgsl: entry.source.browser_text(),
        spirv,
        hlsl,
        msl,
        variant: entry.variant,
        bindings,
    };
    Ok((kernel, used))
}
