// OpenAI's own Node client against a running service: BASE_URL and API_KEY in the environment.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { BASE_URL, API_KEY } = process.env;
const newClient = (apiKey = API_KEY) =>
  new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey, maxRetries: 0, timeout: 120_000 });
const client = newClient();
const [{ id: model }] = (await client.models.list()).data;
const messages = [
  { role: "system", content: "Answer in one word." },
  { role: "user", content: "What is the capital of Italy?" },
];
const City = z.object({ name: z.string().max(24), size: z.enum(["small", "large"]) });
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 }, days: { type: "integer", maximum: 9, minimum: 0 } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
};

test("models are listed and described", async () => {
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a completion, whole and streamed, is the same text", async () => {
  const body = { model, prompt: "The capital of France is", max_tokens: 12, temperature: 0 };
  const whole = await client.completions.create(body);
  assert.match(whole.choices[0].text, /Paris/);
  assert.equal(whole.usage.completion_tokens, 12);
  let text = "";
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, whole.choices[0].text);
});

test("a chat, whole", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 20 });
  assert.match(answer.choices[0].message.content, /Rome/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a chat, streamed through the client's own accumulator, with usage", async () => {
  const body = { model, messages, temperature: 0, max_completion_tokens: 20 };
  const whole = await client.chat.completions.create(body);
  const runner = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  let text = "";
  runner.on("content", (delta) => (text += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.deepEqual(final.usage.completion_tokens, whole.usage.completion_tokens);
});

test("logprobs of a chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 3, logprobs: true, top_logprobs: 2 });
  const entries = answer.choices[0].logprobs.content;
  assert.equal(entries.length, answer.usage.completion_tokens - (answer.choices[0].finish_reason === "stop" ? 1 : 0));
  for (const entry of entries) {
    assert.equal(entry.token, entry.top_logprobs[0].token);
  }
});

test("a stream that is given up ends without an error", async () => {
  const stream = await client.chat.completions.create({ model, messages: [{ role: "user", content: "Tell me a long story." }], stream: true, max_tokens: 500 });
  let chunks = 0;
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    if (++chunks === 3) stream.controller.abort();
  }
  assert.ok(chunks < 100);
});

test("a forced tool call, whole and streamed, has arguments of its schema", async () => {
  const body = {
    model,
    messages: [{ role: "user", content: "The weather in Rome?" }],
    tools: [weather],
    tool_choice: { type: "function", function: { name: "get_weather" } },
    temperature: 0,
    max_tokens: 100,
  };
  const whole = await client.chat.completions.create(body);
  const [call] = whole.choices[0].message.tool_calls;
  const { city, days } = JSON.parse(call.function.arguments);
  assert.equal(typeof city, "string");
  assert.ok(Number.isInteger(days));
  const runner = client.chat.completions.stream(body);
  let pieces = "";
  runner.on("tool_calls.function.arguments.delta", (event) => (pieces += event.arguments_delta));
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  assert.equal(pieces, call.function.arguments);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("the client's tool runner sends a result back and gets an answer", async () => {
  const cities = [];
  const get_weather = (input) => {
    cities.push(input.city);
    return "Sunny";
  };
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "The weather in Rome?" }],
    tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse, function: get_weather } }],
    tool_choice: { type: "function", function: { name: "get_weather" } },
    temperature: 0,
    max_tokens: 100,
  });
  await runner.done();
  assert.equal(cities.length, 1);
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content === "Sunny"));
});

test("structured output is parsed by a zod schema, whole and streamed", async () => {
  const body = { model, messages: [{ role: "user", content: "Paris, as JSON." }], response_format: zodResponseFormat(City, "city"), temperature: 1, seed: 1, max_tokens: 150 };
  const whole = await client.chat.completions.parse(body);
  assert.deepEqual(City.parse(whole.choices[0].message.parsed), whole.choices[0].message.parsed);
  const final = await client.chat.completions.stream(body).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, whole.choices[0].message.parsed);
});

test("a response, whole, retrieved, continued and deleted", async () => {
  const first = await client.responses.create({ model, instructions: "Answer in one word.", input: "What is the capital of Italy?", temperature: 0, max_output_tokens: 20 });
  assert.equal(first.status, "completed");
  assert.match(first.output_text, /Rome/);
  const stored = await client.responses.retrieve(first.id);
  assert.deepEqual(stored.output, first.output);
  const items = await client.responses.inputItems.list(first.id);
  assert.equal(items.data.length, 1);
  const next = await client.responses.create({ model, input: "And of France?", previous_response_id: first.id, temperature: 0, max_output_tokens: 20 });
  assert.equal(next.previous_response_id, first.id);
  assert.ok(next.usage.input_tokens > first.usage.input_tokens);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("a response, streamed, has increasing numbers and the whole text", async () => {
  const stream = await client.responses.create({ model, input: "Count to five.", temperature: 0, max_output_tokens: 30, stream: true });
  let text = "";
  let last = -1;
  let end;
  for await (const event of stream) {
    assert.ok(event.sequence_number > last);
    last = event.sequence_number;
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed" || event.type === "response.incomplete") end = event.response;
  }
  assert.equal(end.output[0].content[0].text, text);
});

test("a response's structured output is parsed by a zod schema", async () => {
  const body = { model, input: "Paris, as JSON.", text: { format: zodTextFormat(City, "city") }, temperature: 1, max_output_tokens: 150 };
  const whole = await client.responses.parse(body);
  assert.deepEqual(City.parse(whole.output_parsed), whole.output_parsed);
  const final = await client.responses.stream(body).finalResponse();
  City.parse(final.output_parsed);
});

test("a response's forced function call", async () => {
  const { name, parameters } = weather.function;
  const answer = await client.responses.create({ model, input: "The weather in Rome?", tools: [{ type: "function", name, parameters, strict: true }], tool_choice: "required", temperature: 0, max_output_tokens: 100 });
  const [call] = answer.output.filter((item) => item.type === "function_call");
  assert.equal(call.name, "get_weather");
  assert.ok("city" in JSON.parse(call.arguments));
});

test("a background response is cancelled", async () => {
  const running = await client.responses.create({ model, input: "Tell me a very long story.", background: true, max_output_tokens: 2000 });
  assert.ok(["queued", "in_progress"].includes(running.status));
  const ended = await client.responses.cancel(running.id);
  assert.equal(ended.status, "cancelled");
});

test("errors arrive as the client's own classes", async () => {
  const body = { model, messages };
  const chat = (fields, from = client) => from.chat.completions.create({ ...body, ...fields });
  await assert.rejects(chat({ temperature: 1e9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(chat({ model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(chat({}, newClient("wrong")), OpenAI.AuthenticationError);
  await assert.rejects(chat({ messages: [{ role: "user", content: "word ".repeat(20_000) }] }), (error) => {
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
  await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
});
