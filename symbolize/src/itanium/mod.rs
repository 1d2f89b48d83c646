//! C++ names, mangled as the Itanium C++ ABI describes (section 5.1), written as c++filt of binutils 2.40 writes them.
//!
//! The grammar is read from left to right into a tree ([`names`], [`types`], [`expressions`]), which is then written ([`print`]).
//! Names are hostile: steps, nesting and output are bounded, so time, stack and memory are, too.

mod expressions;
mod names;
mod print;
mod types;

/// Maximum number of grammar rules applied to one name: a bound for its time and memory. Real names take fewer than they have
/// bytes.
const MAX_STEPS: u32 = 1 << 16;
/// Maximum nesting of rules. Each level uses stack.
const MAX_NESTING: u32 = 256;

/// Demangles a C++ name. `None` if it is none, or exceeds a bound; `max`: bytes of the result.
pub fn demangle(name: &str, max: usize) -> Option<String> {
    if let Some((what, of)) = global(name) {
        let of = demangle(of, max).unwrap_or_else(|| of.to_string());
        return Some(format!("global {what} keyed to {of}")).filter(|text| text.len() <= max);
    }
    let body = name.strip_prefix("__Z").or_else(|| name.strip_prefix("_Z"))?;
    // What GCC and clang count as substitutions differs in one place. Both versions are tried, GCC's first.
    [false, true].into_iter().find_map(|is_clang| {
        let mut parser = Parser::new(body, is_clang);
        let whole = parser.mangled_name()?;
        print::text(&parser.tree, whole, max).filter(|text| !text.is_empty())
    })
}

/// Functions that run constructors or destructors of a file: `_GLOBAL_`, a separator, `I` or `D`, `_`, the first global name.
fn global(name: &str) -> Option<(&'static str, &str)> {
    let rest = name.strip_prefix("_GLOBAL_")?.strip_prefix(['.', '_', '$'])?;
    let constructors = rest.strip_prefix("I_").map(|of| ("constructors", of));
    constructors.or_else(|| rest.strip_prefix("D_").map(|of| ("destructors", of)))
}

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Id(u32);

/// Nodes in a row.
#[derive(Clone, Copy, Debug, Default)]
struct List {
    start: u32,
    end: u32,
}

/// What follows the parameters of a function, or the type.
#[derive(Clone, Copy, Debug, Default)]
struct Qualifiers {
    is_const: bool,
    is_volatile: bool,
    is_restrict: bool,
    /// `&`, `&&` or nothing.
    reference: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Node<'a> {
    /// A name or a builtin type as it is, or punctuation.
    Text(&'a str),
    Number(u64),
    /// An abbreviation of the standard library: what is written, and the name of its constructors.
    Standard(&'static str, &'static str),
    /// Parts without a separator.
    Sequence(List),
    /// The same, as an expression that needs parentheses as an operand.
    Operation(List),
    /// An operand: in parentheses if it is an operation.
    Operand(Id),
    /// Parts separated by commas.
    Commas(List),
    /// `scope::name`
    Scoped(Id, Id),
    /// `function::entity`
    Local(Id, Id),
    /// A name, and arguments in angle brackets.
    Template(Id, List),
    /// A name and its ABI tag.
    Tagged(Id, &'a str),
    /// The last name of a scope, without arguments and tags: that of its constructors.
    Base(Id),
    /// The argument with this number of the template that the function is made from.
    Parameter(usize),
    /// Arguments for one parameter.
    Pack(List),
    /// A pattern, written for each element of the packs in it.
    Expansion(Id),
    /// Another node.
    Alias(Id),
    /// A closure type: declarations of its template parameters and their names, types of its parameters, its number.
    Lambda {
        declarations: List,
        declared: List,
        parameters: List,
        number: u64,
    },
    Cv(Id, Qualifiers),
    Pointer(Id),
    /// An lvalue or rvalue (`true`) reference.
    Reference(Id, bool),
    /// Length (may be empty text) and type of the elements.
    Array(Id, Id),
    /// Class and type.
    MemberPointer(Id, Id),
    Function {
        result: Option<Id>,
        parameters: List,
        qualifiers: Qualifiers,
        /// An exception specification, with a space before it; may be empty text.
        exceptions: Option<Id>,
    },
    /// A function with its name.
    Encoding {
        name: Id,
        result: Option<Id>,
        parameters: List,
        qualifiers: Qualifiers,
        /// A requires clause.
        constraint: Option<Id>,
    },
    /// A type and what follows it after a space: `_Complex`, vendor qualifiers.
    Suffixed(Id, &'a str),
}

/// The nodes of one name.
#[derive(Default)]
struct Tree<'a> {
    nodes: Vec<Node<'a>>,
    lists: Vec<Id>,
}

impl<'a> Tree<'a> {
    fn get(&self, id: Id) -> Option<Node<'a>> {
        self.nodes.get(id.0 as usize).copied()
    }

    fn list(&self, list: List) -> &[Id] {
        self.lists.get(list.start as usize..list.end as usize).unwrap_or(&[])
    }
}

/// Reads one name. Functions return `None` if the name does not follow the grammar, or exceeds a bound; the parser is of no use
/// then.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    tree: Tree<'a>,
    substitutions: Vec<Id>,
    /// Names of the template parameters of the lambda that is read.
    declared: Vec<Id>,
    /// The type of a conversion operator is read: arguments that follow are the operator's.
    in_conversion: bool,
    is_clang: bool,
    steps: u32,
    nesting: u32,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, is_clang: bool) -> Parser<'a> {
        Parser {
            text,
            at: 0,
            tree: Tree::default(),
            substitutions: Vec::new(),
            declared: Vec::new(),
            in_conversion: false,
            is_clang,
            steps: 0,
            nesting: 0,
        }
    }

    /// One level of the grammar, within the bounds.
    fn nested<T>(&mut self, rule: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        self.steps += 1;
        if self.steps > MAX_STEPS || self.nesting >= MAX_NESTING {
            return None;
        }
        self.nesting += 1;
        let result = rule(self);
        self.nesting -= 1;
        result
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn peek(&self) -> u8 {
        self.peek_at(0)
    }

    /// A byte after the next one; 0 at the end.
    fn peek_at(&self, distance: usize) -> u8 {
        let byte = self.text.as_bytes().get(self.at + distance);
        byte.copied().unwrap_or(0)
    }

    fn take(&mut self, expected: &str) -> bool {
        let is_next = self.rest().starts_with(expected);
        self.at += if is_next { expected.len() } else { 0 };
        is_next
    }

    fn expect(&mut self, expected: &str) -> Option<()> {
        self.take(expected).then_some(())
    }

    /// What begins here and has only bytes of a kind; may be empty.
    fn take_while(&mut self, is_of_kind: fn(u8) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.bytes().take_while(|byte| is_of_kind(*byte)).count();
        self.at += length;
        rest.get(..length).unwrap_or("")
    }

    fn number(&mut self) -> Option<usize> {
        self.take_while(|byte| byte.is_ascii_digit()).parse().ok()
    }

    /// A number that begins with 0 for `_`, 1 for `0_`, and so on.
    fn counted(&mut self) -> Option<usize> {
        if self.take("_") {
            return Some(0);
        }
        let number = self.number()?.checked_add(1)?;
        self.expect("_")?;
        Some(number)
    }

    fn node(&mut self, node: Node<'a>) -> Id {
        self.tree.nodes.push(node);
        Id(self.tree.nodes.len() as u32 - 1)
    }

    fn word(&mut self, text: &'a str) -> Id {
        self.node(Node::Text(text))
    }

    fn list(&mut self, ids: &[Id]) -> List {
        let start = self.tree.lists.len() as u32;
        self.tree.lists.extend_from_slice(ids);
        List {
            start,
            end: self.tree.lists.len() as u32,
        }
    }

    fn sequence(&mut self, ids: &[Id]) -> Id {
        let list = self.list(ids);
        self.node(Node::Sequence(list))
    }

    /// Remembers a node as a substitution.
    fn substitutable(&mut self, node: Node<'a>) -> Id {
        let id = self.node(node);
        self.substitutions.push(id);
        id
    }

    /// What `rule` reads, until `end`.
    fn until(&mut self, end: &str, rule: fn(&mut Self) -> Option<Id>) -> Option<Vec<Id>> {
        let mut all = Vec::new();
        while !self.take(end) {
            all.push(rule(self)?);
        }
        Some(all)
    }
}
