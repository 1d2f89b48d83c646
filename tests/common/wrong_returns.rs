//! A tape whose stacks are wrong.

use nativeprof::event::Event;
use nativeprof::tape::Tape;

/// Moves the return addresses on all stacks by one byte.
pub fn make(tape: &mut Tape) {
    let maps: Vec<u8> = tape
        .responses
        .maps
        .iter()
        .filter_map(|response| response.value.clone())
        .flatten()
        .collect();
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let text = String::from_utf8_lossy(&maps);
    let code: Vec<_> = text
        .lines()
        .filter_map(|l| l.split(' ').next()?.split_once('-'))
        .filter_map(|(start, end)| Some(number(start)?..number(end)?))
        .collect();
    for event in &mut tape.events {
        let Event::Sample(s) = event else { continue };
        for word in s.stack.bytes.chunks_exact_mut(8) {
            let address = u64::from_le_bytes((&*word).try_into().expect("eight bytes"));
            if code.iter().any(|c| c.contains(&address)) {
                word.copy_from_slice(&(address + 1).to_le_bytes());
            }
        }
    }
}
