// The work list of the pass: every pass reads its part of the step's plan through these two bindings.
//
// Constants: MAX_GROUPS.

struct PassParams {
    // Word of `plan` where the pass's first work item lies, and how many items there are.
    first: u32,
    count: u32,
    // Words of `plan` where the tiles and the slot lists begin.
    tiles: u32,
    slots: u32,
    // KV heads of the pass: the first, and how many.
    first_head: u32,
    heads: u32,
    // Positions that a query sees, its own included.
    sliding_window: u32,
    // Soft cap of the logits in base 2, or 0.
    soft_cap: f32,
}

@group(0) @binding(0) var<uniform> params: PassParams;
@group(0) @binding(1) var<storage, read> plan: array<u32>;

// More work items than one dimension holds go on in z.
fn work_item(workgroup: vec3<u32>) -> u32 {
    return workgroup.x + workgroup.z * MAX_GROUPS;
}
