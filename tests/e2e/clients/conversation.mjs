// A conversation through OpenAI's client for Node. The one argument is the base URL.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = {
  model: "smol",
  messages: [{ role: "user", content: "Why is the sky blue?" }],
  temperature: 0,
  max_tokens: 12,
};

const models = await client.models.list();
assert.deepEqual(models.data.map((model) => model.id), ["smol", "org/smol", "smol:odd"]);

const whole = await client.chat.completions.create(asked);
assert.equal(whole.usage.completion_tokens, 12);

let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 12);

const response = await client.responses.create({ model: "smol", input: "Hello", max_output_tokens: 4 });
assert.equal(response.status, "incomplete");
assert.equal((await client.responses.retrieve(response.id)).output_text, response.output_text);

await assert.rejects(client.chat.completions.create({ ...asked, model: "none" }), OpenAI.NotFoundError);
await assert.rejects(client.embeddings.create({ model: "smol", input: "a" }), OpenAI.BadRequestError);
