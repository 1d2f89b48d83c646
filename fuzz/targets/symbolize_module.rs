#![no_main]

use libfuzzer_sys::fuzz_target;
use symbolize::Module;

fuzz_target!(|file: &[u8]| {
    let Ok(mut module) = Module::from_bytes(file.to_vec()) else {
        return;
    };
    let mut places: Vec<u64> = module
        .symbols()
        .take(40)
        .flat_map(|f| [f.start, f.start.wrapping_add(5)])
        .collect();
    places.extend((0..0x2000).step_by(97));
    places.extend([u64::MAX, 1 << 63]);
    let found = module.lookup_many(&places);
    assert_eq!(found.len(), places.len());
    assert!(
        found
            .iter()
            .flatten()
            .all(|names| names.last().is_some_and(|f| !f.inlined))
    );
    assert_eq!(module.data_objects(&places).len(), places.len());
    for at in places {
        module.symbol_at(at);
        module.svma_of_offset(at);
    }
    let _ = (module.symbol_named("main"), module.sources(), module.dwarf_error());
    assert!(module.build_id().is_none_or(|id| id.len() <= 64));
});
