// Unpacks what the page was given.

async function unpack(base64) {
  let packed;
  if (Uint8Array.fromBase64) {
    packed = Uint8Array.fromBase64(base64);
  } else {
    const text = atob(base64);
    packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  }
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Makes all text in a value fit to be shown.
function cleanAll(value) {
  if (typeof value === "string") return clean(value);
  if (value && typeof value === "object") for (const key of Object.keys(value)) value[key] = cleanAll(value[key]);
  return value;
}
