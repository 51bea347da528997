// Runs a task of ten tool calls, or requests an object of a schema, with one of the AI SDK's providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, name, kind, task] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: "k" };
const openai = createOpenAI(given);
const model = {
  responses: () => openai(name),
  chat: () => openai.chat(name),
  compatible: () => createOpenAICompatible({ ...given, name: "homing", supportsStructuredOutputs: true })(name),
  messages: () => createAnthropic(given)(name),
}[kind]();

if (task === "loop") {
  let lines = 0;
  const add = tool({
    description: "Adds a line.",
    inputSchema: jsonSchema({ type: "object", properties: { line: { type: "integer" } }, required: ["line"] }),
    execute: async ({ line }) => (line === lines + 1 ? `${++lines} lines` : "wrong"),
  });
  const asked = { model, prompt: "Write ten lines.", tools: { add }, stopWhen: stepCountIs(20), maxRetries: 0 };
  const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  console.log(JSON.stringify({ lines: (await streamed.text, lines), text: await streamed.text }));
} else {
  const schema = jsonSchema({
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" } },
    required: ["name", "age"],
    additionalProperties: false,
  });
  const done = await generateText({ model, prompt: "Who?", output: Output.object({ schema }), maxRetries: 0 });
  console.log(JSON.stringify(done.output));
}
