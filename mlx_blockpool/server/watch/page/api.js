// Requests to this server, with its key where it has one, and its stream of events.

const NAME = "mlx-blockpool-key";
let asking = null;
let askForKey = async () => null;

/** `ask(isWrong)` resolves to a key that a person has typed. */
export function withKeys(ask) {
  askForKey = ask;
}

export const hasKey = () => sessionStorage.getItem(NAME) !== null;

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  location.reload();
}

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem(NAME);
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" }).catch((failure) => {
      if (failure.name === "AbortError") throw failure;
      // Browsers say only that they failed.
      throw new Error("The server does not answer.");
    });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(NAME) !== key) continue;
    // One question, however many requests wait for its answer.
    asking ??= askForKey(key !== null).then((typed) => {
      sessionStorage.setItem(NAME, typed);
      asking = null;
    });
    await asking;
  }
}

/** The JSON of a response. Throws an Error with the server's own words, and with the `status` of its answer. */
export async function call(path, method = "GET", body = undefined, headers = {}) {
  const response = await request(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const answer = await response.json().catch(() => null);
  if (response.ok) return answer;
  const error = answer && answer.error;
  const failure = new Error((error && error.message) || error || `The server answered ${response.status}.`);
  throw Object.assign(failure, { status: response.status });
}

/** POST `body` and call `onChunk` with the JSON of each event of the answer. Throws as call() does. */
export async function stream(path, body, signal, onChunk) {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) {
    const { error } = (await response.json().catch(() => null)) || {};
    throw new Error((error && error.message) || error || `The server answered ${response.status}.`);
  }
  await lines(response, (line) => line.startsWith("data: {") && onChunk(JSON.parse(line.slice(6))));
}

async function lines(response, onLine) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const found = (rest + value).split("\n");
    rest = found.pop();
    found.forEach(onLine);
  }
}

/**
 * Call `onOpen()` and `onEvent(kind)` for each event, as long as the connection lasts. EventSource cannot send a key.
 * Returns the milliseconds to wait before the next connection, if the server says how long that is.
 */
export async function events(onOpen, onEvent) {
  const response = await request("v1/cache/events", {});
  if (!response.ok) throw new Error(`no events: ${response.status}`);
  onOpen();
  let retry;
  await lines(response, (line) => {
    if (line.startsWith("event:")) onEvent(line.slice(6).trim());
    if (line.startsWith("retry:")) retry = Number(line.slice(6));
  });
  return retry;
}
