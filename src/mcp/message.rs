//! Messages of JSON-RPC 2.0, one a line: what the Model Context Protocol sends over standard input and output. They come from
//! another program, which may be controlled by anyone: nothing of them is trusted.

use std::io::{self, BufRead};

use serde_json::{Map, Value, json};

/// Longest line, bytes. Longer ones are skipped.
pub const MAX_LINE: usize = 4 << 20;
/// Longest identifier of a request, bytes.
const MAX_ID: usize = 256;

/// Codes of errors (JSON-RPC 2.0, section 5.1).
pub const PARSE_ERROR: i64 = -32700;
pub const INVALID_REQUEST: i64 = -32600;
pub const METHOD_NOT_FOUND: i64 = -32601;
pub const INVALID_PARAMS: i64 = -32602;
/// The same of the Model Context Protocol (revision 2026-07-28, `UnsupportedProtocolVersionError`).
pub const UNSUPPORTED_VERSION: i64 = -32022;

/// The identifier of a request: a text, or a whole number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestId {
    Number(i64),
    Text(String),
}

/// A message from the client.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Request {
        id: RequestId,
        method: String,
        params: Map<String, Value>,
    },
    Notification {
        method: String,
        params: Map<String, Value>,
    },
    /// An answer; nothing is ever asked.
    Answer,
    /// Not a message: what to answer.
    Invalid {
        id: Option<RequestId>,
        code: i64,
        text: &'static str,
    },
}

impl RequestId {
    /// `None` if a value cannot be one.
    pub fn of(value: &Value) -> Option<RequestId> {
        match value {
            Value::Number(number) => number.as_i64().map(RequestId::Number),
            Value::String(text) if text.len() <= MAX_ID => Some(RequestId::Text(text.clone())),
            _ => None,
        }
    }

    fn json(&self) -> Value {
        match self {
            RequestId::Number(number) => json!(number),
            RequestId::Text(text) => json!(text),
        }
    }
}

/// Reads the next message; `None` at the end of the input. Empty lines are skipped.
///
/// # Errors
/// Those of the input.
pub fn read(input: &mut impl BufRead) -> io::Result<Option<Message>> {
    loop {
        let mut line = Vec::new();
        let mut is_too_long = false;
        loop {
            let buffer = input.fill_buf()?;
            if buffer.is_empty() {
                if line.is_empty() && !is_too_long {
                    return Ok(None);
                }
                break;
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let part = end.and_then(|end| buffer.get(..end)).unwrap_or(buffer);
            is_too_long |= line.len() + part.len() > MAX_LINE;
            if is_too_long {
                line = Vec::new();
            } else {
                line.extend_from_slice(part);
            }
            let used = part.len() + usize::from(end.is_some());
            input.consume(used);
            if end.is_some() {
                break;
            }
        }
        if is_too_long {
            return Ok(Some(invalid(None, INVALID_REQUEST, "the message is longer than 4 MiB")));
        }
        if !line.iter().all(u8::is_ascii_whitespace) {
            return Ok(Some(parse(&line)));
        }
    }
}

/// What a line says.
pub fn parse(line: &[u8]) -> Message {
    let Ok(value) = serde_json::from_slice::<Value>(line) else {
        return invalid(None, PARSE_ERROR, "the line is not JSON");
    };
    let Value::Object(mut message) = value else {
        return invalid(
            None,
            INVALID_REQUEST,
            "a message is an object; batches are not part of the protocol",
        );
    };
    let id = message.get("id").map(RequestId::of);
    let known = id.clone().flatten();
    if message.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return invalid(known, INVALID_REQUEST, "jsonrpc has to be \"2.0\"");
    }
    let method = match message.remove("method") {
        Some(Value::String(method)) => method,
        None if message.contains_key("result") || message.contains_key("error") => return Message::Answer,
        _ => return invalid(known, INVALID_REQUEST, "method has to be a text"),
    };
    let params = match message.remove("params") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(params)) => params,
        Some(_) => return invalid(known, INVALID_PARAMS, "params have to be an object"),
    };
    match id {
        None => Message::Notification { method, params },
        Some(Some(id)) => Message::Request { id, method, params },
        Some(None) => invalid(None, INVALID_REQUEST, "id has to be a short text or a whole number"),
    }
}

fn invalid(id: Option<RequestId>, code: i64, text: &'static str) -> Message {
    Message::Invalid { id, code, text }
}

/// The answer to a request.
pub fn result(id: &RequestId, result: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id.json(), "result": result})
}

/// The answer to a request that is refused.
pub fn error(id: Option<&RequestId>, code: i64, text: &str, data: Option<Value>) -> Value {
    let mut error = json!({"code": code, "message": text});
    if let Some(data) = data {
        error["data"] = data;
    }
    json!({"jsonrpc": "2.0", "id": id.map(RequestId::json), "error": error})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(input: &[u8]) -> Vec<Message> {
        let mut reader = io::BufReader::with_capacity(7, input);
        std::iter::from_fn(|| read(&mut reader).expect("no error")).collect()
    }

    #[test]
    fn lines_are_messages() {
        let messages = all(b"\n{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\r\n \n\
            {\"jsonrpc\":\"2.0\",\"method\":\"x\",\"params\":{\"a\":1}}\n{\"jsonrpc\":\"2.0\",\"id\":\"q\",\"result\":{}}");
        assert_eq!(messages.len(), 3);
        assert!(matches!(&messages[0], Message::Request { id: RequestId::Number(1), method, .. } if method == "ping"));
        assert!(matches!(&messages[1], Message::Notification { params, .. } if params["a"] == 1));
        assert_eq!(messages[2], Message::Answer);
    }

    #[test]
    fn what_is_not_a_message_is_said() {
        for (line, code, id) in [
            ("{", PARSE_ERROR, None),
            ("\u{1}", PARSE_ERROR, None),
            ("[]", INVALID_REQUEST, None),
            (
                "[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}]",
                INVALID_REQUEST,
                None,
            ),
            (
                "{\"id\":7,\"method\":\"ping\"}",
                INVALID_REQUEST,
                Some(RequestId::Number(7)),
            ),
            (
                "{\"jsonrpc\":\"2.0\",\"id\":7}",
                INVALID_REQUEST,
                Some(RequestId::Number(7)),
            ),
            (
                "{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":1}",
                INVALID_REQUEST,
                Some(RequestId::Number(7)),
            ),
            (
                "{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"ping\"}",
                INVALID_REQUEST,
                None,
            ),
            (
                "{\"jsonrpc\":\"2.0\",\"id\":1.5,\"method\":\"ping\"}",
                INVALID_REQUEST,
                None,
            ),
            (
                "{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"ping\",\"params\":[1]}",
                INVALID_PARAMS,
                Some(RequestId::Text("a".into())),
            ),
        ] {
            match parse(line.as_bytes()) {
                Message::Invalid { id: said, code: is, .. } => assert_eq!((is, said), (code, id), "{line}"),
                other => panic!("{line}: {other:?}"),
            }
        }
        let deep = "[".repeat(100_000);
        assert!(matches!(
            parse(deep.as_bytes()),
            Message::Invalid { code: PARSE_ERROR, .. }
        ));
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped() {
        let mut input = vec![b'x'; MAX_LINE + 1];
        input.extend(b"\n{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\n");
        let messages = all(&input);
        assert!(matches!(
            messages[0],
            Message::Invalid {
                code: INVALID_REQUEST,
                ..
            }
        ));
        assert!(matches!(messages[1], Message::Request { .. }) && messages.len() == 2);
    }
}
