//! Buffers whose creation fails with a typed error.

use super::now_or_never;
use crate::error::Error;
use wgpu::BufferUsages;

/// What `make` returns, unless wgpu found something wrong: a buffer of a device that is lost, say, which is
/// no error when it is created. In browsers the answer comes too late to be seen here.
pub(in crate::gpu) fn scoped<T>(device: &wgpu::Device, make: impl FnOnce() -> T) -> Result<T, Error> {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = make();
    match now_or_never(scope.pop()) {
        Some(Some(error)) => Err(Error::Device(error.to_string())),
        _ => Ok(made),
    }
}

/// A buffer, and a future that says whether it could be created. On native the future is ready at once.
fn create(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: BufferUsages,
    mapped_at_creation: bool,
) -> (wgpu::Buffer, impl Future<Output = Result<(), Error>> + use<>) {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let buffer =
        device.create_buffer(&wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation });
    let validation = validation.pop();
    let memory = memory.pop();
    (buffer, async move {
        if memory.await.is_some() {
            return Err(Error::OutOfMemory { what, bytes: size });
        }
        validation.await.map_or(Ok(()), |error| Err(Error::Device(error.to_string())))
    })
}

/// The same, with what can be known at once: on native everything, in browsers nothing.
fn create_now(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: BufferUsages,
    mapped_at_creation: bool,
) -> Result<wgpu::Buffer, Error> {
    let (buffer, created) = create(device, what, size, usage, mapped_at_creation);
    now_or_never(created).unwrap_or(Ok(()))?;
    Ok(buffer)
}

/// A buffer of zeros.
pub(in crate::gpu) async fn buffer(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: BufferUsages,
) -> Result<wgpu::Buffer, Error> {
    let (buffer, created) = create(device, what, size, usage, false);
    created.await?;
    Ok(buffer)
}

/// A buffer of zeros. In browsers a failure shows only when it is used.
pub(in crate::gpu) fn buffer_now(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: BufferUsages,
) -> Result<wgpu::Buffer, Error> {
    create_now(device, what, size, usage, false)
}

/// A buffer that is mapped for writing. In browsers a failure shows only when it is used.
pub(in crate::gpu) fn mapped_buffer(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: BufferUsages,
) -> Result<wgpu::Buffer, Error> {
    create_now(device, what, size, usage, true)
}

/// A buffer with fixed contents.
pub(in crate::gpu) fn filled_buffer(
    device: &wgpu::Device,
    what: &'static str,
    contents: &[u8],
    usage: BufferUsages,
) -> Result<wgpu::Buffer, Error> {
    let buffer = mapped_buffer(device, what, contents.len() as u64, usage)?;
    write_mapped(&buffer, contents)?;
    Ok(buffer)
}

/// Fills the start of a mapped buffer and unmaps it.
pub(in crate::gpu) fn write_mapped(buffer: &wgpu::Buffer, bytes: &[u8]) -> Result<(), Error> {
    let range = buffer.slice(..bytes.len() as u64).get_mapped_range_mut();
    range.map_err(|e| Error::Device(e.to_string()))?.copy_from_slice(bytes);
    buffer.unmap();
    Ok(())
}
