//! A Vulkan device that only compiles, and says what it made.

use super::{Job, Statistics};
use ash::vk;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

pub struct Device {
    // Keeps the loader.
    _entry: ash::Entry,
    _instance: ash::Instance,
    device: ash::Device,
    properties: ash::khr::pipeline_executable_properties::Device,
    driver: String,
}

fn text(characters: &[c_char]) -> String {
    // SAFETY: Vulkan's fixed arrays of characters end with a zero.
    unsafe { CStr::from_ptr(characters.as_ptr()) }.to_string_lossy().into_owned()
}

impl Device {
    /// The null device of this family, for which the environment has to ask.
    pub fn open(family: &str) -> Result<Device, String> {
        let say = |e: vk::Result| e.to_string();
        // SAFETY: the loader is Vulkan's own, all handles are used with what they were made from, and the
        // structs live until the calls return.
        unsafe {
            let entry = ash::Entry::load().map_err(|e| e.to_string())?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let info = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&info, None).map_err(say)?;
            let physical = instance.enumerate_physical_devices().map_err(say)?;
            let physical = *physical.first().ok_or("no device")?;
            let mut driver = vk::PhysicalDeviceDriverProperties::default();
            let mut about = vk::PhysicalDeviceProperties2::default().push_next(&mut driver);
            instance.get_physical_device_properties2(physical, &mut about);
            let name = text(&about.properties.device_name);
            let driver = text(&driver.driver_info);
            if !name.to_lowercase().contains(family) {
                return Err(format!("asked for {family}, got {name:?}"));
            }

            // Whatever the device has: nothing runs on it.
            let mut executables = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default();
            let mut v11 = vk::PhysicalDeviceVulkan11Features::default();
            let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
            let mut v13 = vk::PhysicalDeviceVulkan13Features::default();
            let mut features = vk::PhysicalDeviceFeatures2::default()
                .push_next(&mut executables)
                .push_next(&mut v11)
                .push_next(&mut v12)
                .push_next(&mut v13);
            instance.get_physical_device_features2(physical, &mut features);
            let queue = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
            let extensions = [ash::khr::pipeline_executable_properties::NAME.as_ptr()];
            let info = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queue)
                .enabled_extension_names(&extensions)
                .push_next(&mut features);
            let device = instance.create_device(physical, &info, None).map_err(say)?;
            let properties = ash::khr::pipeline_executable_properties::Device::new(&instance, &device);
            Ok(Device { _entry: entry, _instance: instance, device, properties, driver })
        }
    }

    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Compiles a SPIR-V module.
    pub fn compile(&self, job: &Job) -> Result<Statistics, String> {
        let bytes = std::fs::read(&job.file).map_err(|e| e.to_string())?;
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let name = CString::new(job.entry_point.as_str()).map_err(|e| e.to_string())?;
        let say = |e: vk::Result| e.to_string();
        // SAFETY: as in `open`; naga's SPIR-V is valid, and the layouts have every binding that it declares.
        unsafe {
            let mut layouts = Vec::new();
            let groups = job.bindings.iter().map(|b| b.group + 1).max().unwrap_or(0);
            for group in 0..groups {
                let bindings: Vec<_> = job
                    .bindings
                    .iter()
                    .filter(|b| b.group == group)
                    .map(|b| {
                        let kind = match b.uniform {
                            true => vk::DescriptorType::UNIFORM_BUFFER,
                            false => vk::DescriptorType::STORAGE_BUFFER,
                        };
                        vk::DescriptorSetLayoutBinding::default()
                            .binding(b.binding)
                            .descriptor_type(kind)
                            .descriptor_count(1)
                            .stage_flags(vk::ShaderStageFlags::COMPUTE)
                    })
                    .collect();
                let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
                layouts.push(self.device.create_descriptor_set_layout(&info, None).map_err(say)?);
            }
            let info = vk::PipelineLayoutCreateInfo::default().set_layouts(&layouts);
            let layout = self.device.create_pipeline_layout(&info, None).map_err(say)?;
            let info = vk::ShaderModuleCreateInfo::default().code(&words);
            let module = self.device.create_shader_module(&info, None).map_err(say)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(&name);
            let info = vk::ComputePipelineCreateInfo::default()
                .flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR)
                .layout(layout)
                .stage(stage);
            let pipelines = self.device.create_compute_pipelines(vk::PipelineCache::null(), &[info], None);
            let pipeline = *pipelines.map_err(|(_, e)| e.to_string())?.first().ok_or("no pipeline")?;
            let statistics = self.statistics(pipeline);
            self.device.destroy_pipeline(pipeline, None);
            self.device.destroy_shader_module(module, None);
            self.device.destroy_pipeline_layout(layout, None);
            layouts.into_iter().for_each(|l| self.device.destroy_descriptor_set_layout(l, None));
            statistics
        }
    }

    /// # Safety
    /// The pipeline is this device's, and captured statistics.
    unsafe fn statistics(&self, pipeline: vk::Pipeline) -> Result<Statistics, String> {
        let info = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline).executable_index(0);
        // SAFETY: as the caller says.
        let all = unsafe { self.properties.get_pipeline_executable_statistics(&info) }
            .map_err(|e| e.to_string())?;
        let named: BTreeMap<String, u64> = all
            .iter()
            // SAFETY: the format says which member is valid; both others are read as what they are.
            .map(|s| match s.format {
                vk::PipelineExecutableStatisticFormatKHR::UINT64 => (text(&s.name), unsafe { s.value.u64 }),
                vk::PipelineExecutableStatisticFormatKHR::INT64 => {
                    (text(&s.name), unsafe { s.value.i64 } as u64)
                }
                _ => (text(&s.name), 0),
            })
            .collect();
        let get =
            |name: &str| named.get(name).copied().ok_or_else(|| format!("the driver reports no {name}"));
        Ok(Statistics {
            vgprs: get("VGPRs")?,
            spilled: get("Spilled VGPRs")? + get("Spilled SGPRs")?,
            lds: get("LDS size")?,
            subgroups: get("Subgroups per SIMD")?,
            instructions: get("Instructions")?,
        })
    }
}
