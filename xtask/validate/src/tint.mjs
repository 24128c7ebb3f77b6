// Compiles every file of a folder as a compute pipeline; prints errors and, last, how many were checked, separated by U+0001.
import { create, globals } from 'webgpu';
import fs from 'fs';
Object.assign(globalThis, globals);
const gpu = create(['backend=null']);
const adapter = await gpu.requestAdapter();
const wanted = ['subgroups'];
const missing = wanted.filter((f) => !adapter.features.has(f));
if (missing.length > 0) {
  throw new Error(`the null adapter lacks ${missing}`);
}
const device = await adapter.requestDevice({ requiredFeatures: wanted });
const folder = process.argv[2];
let checked = 0;
for (const file of fs.readdirSync(folder)) {
  const code = fs.readFileSync(`${folder}/${file}`, 'utf8');
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code });
  device.createComputePipeline({ layout: 'auto', compute: { module } });
  const error = await device.popErrorScope();
  checked += 1;
  if (error) {
    fs.writeSync(1, `${file}: ${error.message.slice(0, 1000)}\u0001`);
  }
}
fs.writeSync(1, `checked ${checked}`);
// Dawn keeps the process alive otherwise.
process.exit(0);
