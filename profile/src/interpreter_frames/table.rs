//! The tables of interpreter frames: functions by name, files of glue, and what of them users know.
//!
//! Names are those of CPython 3.6 to 3.15 (`Programs/`, `Modules/`, `Objects/`, `Python/` of its sources), with the versions
//! that have them.

/// What a frame means to the reader of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Ran before the interpreter: the process's entry, the first function of a thread.
    Outer,
    /// The interpreter's start-up.
    Start,
    /// The interpreter's start of a thread.
    ThreadStart,
    /// Stands between a call and what it calls.
    Glue,
    /// Imports a module, in Python.
    Import,
    /// Collects garbage: cycles of objects that nothing else refers to.
    Collection,
    /// What the interpreter does at its end; it is not start-up, whatever it calls.
    End,
    /// A function of the interpreter that has no name.
    Nameless,
    /// Another function of a file that holds the interpreter and nothing else.
    Interpreter,
    /// Any other function.
    Other,
}

/// Functions of some versions of CPython, 3.`since` to 3.`until`.
pub struct FunctionNames {
    /// The role of all of these functions.
    pub role: Role,
    /// Minor number of the first version.
    pub since: u8,
    /// Minor number of the last version.
    pub until: u8,
    /// Names; a `*` at the end represents any text, one at the front too.
    pub names: &'static [&'static str],
}

const LATEST: u8 = u8::MAX;

const fn names(role: Role, since: u8, until: u8, names: &'static [&'static str]) -> FunctionNames {
    FunctionNames {
        role,
        since,
        until,
        names,
    }
}

/// Native functions by name. The first row that fits decides.
pub const NATIVE: &[FunctionNames] = &[
    // The C library's way to `main` and to a thread's function (glibc, musl).
    names(
        Role::Outer,
        6,
        LATEST,
        &[
            "_start",
            "_start_c",
            "__libc_start_main*",
            "__libc_start_call_main",
            "libc_start_main_stage2",
            "clone",
            "__clone",
            "clone3",
            "__clone3",
            "start_thread",
            "start",
            "main",
        ],
    ),
    names(
        Role::End,
        6,
        LATEST,
        &["Py_Finalize*", "_Py_Finalize*", "Py_EndInterpreter", "Py_Exit"],
    ),
    // Modules/gcmodule.c; from 3.13 on Python/gc.c and, of free-threaded interpreters, Python/gc_free_threading.c. What starts a
    // collection and does nothing else, since compilers leave one function or another: `_PyObject_GC_Alloc` or, from 3.12 on,
    // `_Py_HandlePending` calls these.
    names(
        Role::Collection,
        6,
        LATEST,
        &["gc_collect*", "PyGC_Collect", "_PyGC_Collect*"],
    ),
    names(
        Role::Collection,
        6,
        9,
        &["collect", "collect_generations", "collect_with_callback"],
    ),
    names(Role::Collection, 12, LATEST, &["_Py_RunGC"]),
    // Modules/main.c, Python/pythonrun.c
    names(Role::Start, 6, LATEST, &["Py_Main", "run_mod", "PyRun_*", "_PyRun_*"]),
    names(
        Role::Start,
        6,
        6,
        &["run_file", "run_command", "RunMainFromImporter", "RunModule"],
    ),
    names(Role::Start, 7, 7, &["_Py_UnixMain"]),
    names(Role::Start, 7, LATEST, &["pymain_*"]),
    names(
        Role::Start,
        8,
        LATEST,
        &["Py_BytesMain", "Py_RunMain", "run_eval_code_obj"],
    ),
    names(Role::Start, 8, 13, &["pyrun_file", "pyrun_simple_file"]),
    // Modules/_threadmodule.c, Python/thread_pthread.h
    names(Role::ThreadStart, 6, 9, &["t_bootstrap"]),
    names(Role::ThreadStart, 6, LATEST, &["pythread_wrapper"]),
    names(Role::ThreadStart, 10, LATEST, &["thread_run"]),
    // Objects/call.c; Objects/abstract.c up to 3.6
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "PyObject_Call",
            "PyObject_CallFunction*",
            "PyObject_CallMethod*",
            "PyObject_CallObject",
            "PyObject_CallNoArgs",
            "PyObject_CallOneArg",
            "_PyObject_Call*",
            "_PyObject_FastCall*",
            "_PyStack_*",
            "_Py_CheckFunctionResult",
            "callmethod",
        ],
    ),
    names(
        Role::Glue,
        6,
        6,
        &["call_function_tail", "objargs_mktuple", "function_call"],
    ),
    names(
        Role::Glue,
        6,
        7,
        &[
            "_PyFunction_FastCall*",
            "_PyCFunction_FastCall*",
            "_PyMethodDef_RawFastCall*",
        ],
    ),
    names(Role::Glue, 6, 8, &["PyCFunction_Call"]),
    names(Role::Glue, 7, 8, &["cfunction_call_varargs"]),
    names(Role::Glue, 7, 9, &["function_code_fastcall"]),
    names(
        Role::Glue,
        7,
        LATEST,
        &["object_vacall", "_PyMethodDescr_FastCallKeywords"],
    ),
    names(
        Role::Glue,
        8,
        LATEST,
        &[
            "*Vectorcall*",
            "_PyVectorcall_*",
            "PyVectorcall_*",
            "_PyObject_MakeTpCall",
            "vectorcall_*",
            "_Py_CheckSlotResult",
        ],
    ),
    // Objects/methodobject.c, Objects/descrobject.c, Objects/classobject.c
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "method_call",
            "methoddescr_call",
            "classmethoddescr_call",
            "wrapperdescr_call",
            "wrapperdescr_raw_call",
            "wrapper_call",
            "instancemethod_call",
            "property_descr_get",
            "property_descr_set",
            "meth_dealloc",
            "method_get",
            "method_dealloc",
            "getset_get",
            "getset_set",
            "member_get",
            "member_set",
            "descr_check",
            "descr_setcheck",
        ],
    ),
    names(
        Role::Glue,
        8,
        LATEST,
        &["method_vectorcall*", "cfunction_vectorcall*", "method_check_args"],
    ),
    names(
        Role::Glue,
        9,
        LATEST,
        &["cfunction_call", "cfunction_enter_call", "method_enter_call"],
    ),
    // Python/ceval.c and what it includes
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "_PyEval_*",
            "PyEval_*",
            "_PyEvalFrame*",
            "_Py_EnterRecursive*",
            "_Py_LeaveRecursive*",
            "Py_EnterRecursiveCall",
            "Py_LeaveRecursiveCall",
            "_Py_MakeRecCheck",
            "_Py_MakePendingCalls",
            "make_pending_calls",
            "unpack_iterable",
            "import_name",
            "import_from",
            "import_all_from",
            "do_call_core",
            "call_trace*",
        ],
    ),
    names(
        Role::Glue,
        6,
        6,
        &["fast_function", "do_call", "load_args", "ext_do_call"],
    ),
    names(Role::Glue, 6, 10, &["call_function"]),
    names(Role::Glue, 8, 10, &["trace_call_function"]),
    names(
        Role::Glue,
        11,
        LATEST,
        &["initialize_locals", "clear_thread_frame", "clear_gen_frame"],
    ),
    names(
        Role::Glue,
        12,
        LATEST,
        &["_Py_HandlePending", "_Py_call_instrumentation*"],
    ),
    names(
        Role::Glue,
        14,
        LATEST,
        &[
            "_Py_ReachedRecursionLimitWithMargin",
            "_PyObjectArray_*",
            "_Py_assert_within_stack_bounds",
            "maybe_lltrace_resume_frame",
            "check_periodics*",
        ],
    ),
    names(
        Role::Glue,
        15,
        LATEST,
        &[
            "_PyCallMethodDescriptor*",
            "_Py_BuiltinCall*",
            "_Py_CallBuiltin*",
            "_Py_VectorCall*",
            "_Py_LoadAttr_StackRefSteal",
            "_PyForIter_VirtualIteratorNext",
            "_PyObject_GetAttrStackRef",
        ],
    ),
    // From a slot of a type to the method of a class written in Python, and back (Objects/typeobject.c)
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "slot_*",
            "type_call",
            "tp_new_wrapper",
            "wrap_*",
            "call_method",
            "call_attribute",
            "lookup_maybe*",
            "lookup_method",
        ],
    ),
    names(Role::Glue, 6, 8, &["call_maybe"]),
    names(Role::Glue, 7, LATEST, &["call_unbound*"]),
    names(Role::Glue, 12, LATEST, &["_Py_slot_tp_getattr_hook"]),
    names(
        Role::Glue,
        14,
        LATEST,
        &["type_vectorcall", "maybe_call_special_*", "_PyObject_MaybeCallSpecial*"],
    ),
    // From an operator or protocol to a type's slot (Objects/abstract.c, Objects/object.c)
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "PyNumber_*",
            "_PyNumber_*",
            "binary_op",
            "binary_op1",
            "binary_iop1",
            "ternary_op",
            "do_richcompare",
            "PyObject_RichCompare",
            "PyObject_RichCompareBool",
            "PyObject_GetItem",
            "PyObject_SetItem",
            "PyObject_DelItem",
            "PyObject_GetAttr",
            "PyObject_GetAttrString",
            "PyObject_SetAttr",
            "PyObject_SetAttrString",
            "PyObject_GetOptionalAttr*",
            "_PyObject_LookupAttr*",
            "_PyObject_GetAttrId",
            "PyObject_GetIter",
            "PyObject_Hash",
            "PyObject_IsTrue",
            "PyObject_Size",
            "PyObject_Str",
            "PyObject_Repr",
            "PyObject_Format",
            "PyObject_IsInstance",
            "PyObject_IsSubclass",
            "PyObject_LengthHint",
            "object_recursive_isinstance",
            "object_isinstance",
            "object_issubclass",
            "PySequence_Contains",
            "PySequence_Size",
            "PySequence_GetItem",
            "PyIter_*",
            "iternext",
            "_Py_Dealloc",
            "PyObject_CallFinalizer*",
        ],
    ),
    // From an iteration to a generator's frame (Objects/genobject.c)
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "gen_send_ex",
            "gen_iternext",
            "gen_close_iter",
            "async_gen_asend_iternext",
        ],
    ),
    names(Role::Glue, 10, LATEST, &["gen_send_ex2", "PyGen_am_send"]),
    // Python/import.c
    names(
        Role::Glue,
        6,
        LATEST,
        &["PyImport_ImportModule*", "PyImport_Import", "import_ensure_initialized"],
    ),
    names(Role::Glue, 7, LATEST, &["import_find_and_load*"]),
    // What Cython writes into modules for the same purpose (Cython/Utility/ObjectHandling.c)
    names(
        Role::Glue,
        6,
        LATEST,
        &[
            "__Pyx_PyObject_Call*",
            "__Pyx_PyObject_FastCall*",
            "__Pyx_PyFunction_FastCall*",
            "__Pyx_PyVectorcall_*",
        ],
    ),
];

/// Source files of glue, by the end of their path from CPython's root; all of their functions are glue but those in
/// [`KNOWN_BY_NAME`].
pub const GLUE_SOURCES: &[&str] = &[
    "Objects/call.c",
    "Objects/methodobject.c",
    "Objects/descrobject.c",
    "Objects/classobject.c",
    "Python/ceval.c",
    "Python/ceval.h",
    "Python/ceval_gil.c",
    "Python/ceval_gil.h",
    "Python/ceval_macros.h",
    "Python/generated_cases.c.h",
];

/// Functions in files of glue that stay: users name them in Python, or know them as a cause (the GIL).
pub const KNOWN_BY_NAME: &[&str] = &[
    "mappingproxy_*",
    "mappingproxy",
    "property_init*",
    "property_getter",
    "property_setter",
    "property_deleter",
    "property_copy",
    "take_gil",
    "drop_gil*",
    "PyEval_GetCallStats",
];

/// Python functions around a program or a thread, by the name of the file: outermost in a stack they are start-up.
pub const PYTHON_START: &[(&str, Role, &[&str])] = &[
    (
        "runpy.py",
        Role::Start,
        &["_run_module_as_main", "_run_code", "_run_module_code"],
    ),
    (
        "<frozen runpy>",
        Role::Start,
        &["_run_module_as_main", "_run_code", "_run_module_code"],
    ),
    (
        "threading.py",
        Role::ThreadStart,
        &["_bootstrap", "_bootstrap_inner", "run"],
    ),
];

/// Files of the import system that is written in Python.
pub const IMPORT_FILES: &[&str] = &[
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
    "<frozen zipimport>",
];
