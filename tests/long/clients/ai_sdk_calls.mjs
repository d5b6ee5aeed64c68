// Vercel's AI SDK with @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const url = process.env.MLXRT_URL, name = process.env.MLXRT_MODEL ?? "smollm2";
const provider = createOpenAICompatible({ name: "mlxrt", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true });
const model = provider(name);
const prompt = "What is the capital of France? Answer in one word.";
const schema = jsonSchema({ type: "object", properties: { name: { type: "string", enum: ["Paris", "Rome"] } }, required: ["name"], additionalProperties: false });
const options = { model, prompt, maxOutputTokens: 40, maxRetries: 0 };

async function check(call, work) {
  try {
    const found = await work();
    console.log(JSON.stringify({ call, ok: Boolean(found), note: found ? "" : `gave ${found}` }));
  } catch (error) {
    console.log(JSON.stringify({ call, ok: false, note: String(error).slice(0, 300) }));
  }
}

await check("generateText", async () => (await generateText(options)).text.includes("Paris"));
await check("generateText: usage", async () => (await generateText(options)).usage.outputTokens > 0);
await check("streamText", async () => {
  const result = streamText(options);
  let text = "";
  for await (const part of result.textStream) text += part;
  return text.includes("Paris") && (await result.usage).outputTokens > 0 && (await result.finishReason);
});
await check("streamText: abort", async () => {
  const controller = new AbortController();
  const result = streamText({ ...options, abortSignal: controller.signal, onError() {} });
  try {
    for await (const part of result.textStream) controller.abort();
  } catch { return true; }
  return true;
});
await check("generateObject", async () => (await generateObject({ ...options, schema })).object.name === "Paris");
await check("generateText: tools", async () => {
  const tools = { visit: tool({ description: "visit a city", inputSchema: schema }) };
  return (await generateText({ ...options, tools, toolChoice: "required" })).toolCalls[0].input.name;
});
await check("an unknown model", async () => {
  try { await generateText({ ...options, model: provider("other") }); } catch (error) { return error.statusCode === 404; }
});
