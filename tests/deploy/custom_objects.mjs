// Checks objects of kinds that Kubernetes itself does not know, read from standard input as a JSON array, against the
// types and schemas of their projects. TypeScript finds unknown fields, as the API server's strict mode does;
// validate() finds missing fields and wrong values. Prints one JSON list of problems.
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [packages] = process.argv.slice(2);
const require = createRequire(join(packages, "package.json"));
const ts = require("typescript");
const PROJECTS = {
  "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
  "keda.sh": "@kubernetes-models/keda",
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
};

function moduleOf({ apiVersion, kind }) {
  return `${PROJECTS[apiVersion.split("/")[0]]}/${apiVersion}/${kind}`;
}

function unknownFields(objects) {
  const source = objects.map((object, i) =>
    `import { I${object.kind} as Kind${i} } from "${moduleOf(object)}";\nexport const o${i}: Kind${i} = ${JSON.stringify(object)};\n`);
  const folder = mkdtempSync(join(packages, "checked-"));
  try {
    const file = join(folder, "objects.ts");
    writeFileSync(file, source.join(""));
    const options = { noEmit: true, strict: true, skipLibCheck: true, types: [], module: ts.ModuleKind.NodeNext };
    const found = ts.getPreEmitDiagnostics(ts.createProgram([file], options));
    return found.map((item) => ts.flattenDiagnosticMessageText(item.messageText, "\n"));
  } finally {
    rmSync(folder, { recursive: true });
  }
}

async function wrongValues(object) {
  const found = await import(join(packages, "node_modules", `${moduleOf(object)}.js`));
  try {
    new found[object.kind](object).validate();
    return [];
  } catch (error) {
    return [`${object.kind}: ${error.message}`];
  }
}

const objects = JSON.parse(readFileSync(0, "utf8"));
const wrong = await Promise.all(objects.map(wrongValues));
console.log(JSON.stringify([...unknownFields(objects), ...wrong.flat()]));
