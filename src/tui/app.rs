//! What is being looked at, and what keys do to it. Draws nothing.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use regex::{Regex, RegexBuilder};

use super::rows::{self, Row, Sort, Subject};
use crate::sample::Tid;
use crate::tree::profile::{Frame, Profile};

/// Seconds that can be looked at together.
const WINDOWS: &[u64] = &[1, 2, 5, 10, 30, 60];
/// Letters of an input.
const MAX_INPUT: usize = 500;
/// Bytes that a compiled filter may take.
const MAX_FILTER: usize = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Page {
    #[default]
    Functions,
    Stacks,
    Threads,
    /// Callers and callees of a function.
    Around(Box<Frame>),
}

/// What the user types a line for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Filter,
    Save,
}

/// What the caller of [`App::key`] must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Act {
    Nothing,
    Quit,
    /// Write what is shown to this path.
    Save(String),
    /// Look at the samples anew.
    Look,
}

pub struct App {
    pub page: Page,
    /// Pages that Esc leads back to.
    back: Vec<Page>,
    pub sort: Sort,
    pub seconds: u64,
    pub frozen: bool,
    pub ended: bool,
    pub help: bool,
    pub thread: Option<Tid>,
    pub input: Option<(Input, String)>,
    pub filter: String,
    compiled: Option<Regex>,
    pub message: String,
    profile: Profile,
    pub rows: Vec<Row>,
    pub table: TableState,
    /// Rows that fit on the screen; set when it is drawn.
    pub page_rows: usize,
}

impl Default for App {
    fn default() -> App {
        App {
            page: Page::Functions,
            back: Vec::new(),
            sort: Sort::Own,
            seconds: 5,
            frozen: false,
            ended: false,
            help: false,
            thread: None,
            input: None,
            filter: String::new(),
            compiled: None,
            message: String::new(),
            profile: Profile::default(),
            rows: Vec::new(),
            table: TableState::default().with_selected(Some(0)),
            page_rows: 10,
        }
    }
}

impl App {
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The thread whose samples are wanted; of all for the list of threads.
    pub fn wanted_thread(&self) -> Option<Tid> {
        self.thread.filter(|_| self.page != Page::Threads)
    }

    /// Shows other samples.
    pub fn show(&mut self, profile: Profile) {
        self.profile = profile;
        self.refresh();
    }

    /// Makes the rows anew; the selection stays with what it was on, where that is still there and not at the top.
    fn refresh(&mut self) {
        let filter = self.compiled.as_ref();
        let rows = match &self.page {
            Page::Functions => rows::functions(&self.profile, filter, self.sort),
            Page::Stacks => rows::stacks(&self.profile, filter),
            Page::Threads => rows::threads(&self.profile, filter, self.sort),
            Page::Around(function) => rows::around(&self.profile, function, self.sort),
        };
        let at = self.table.selected().unwrap_or(0);
        let on = self.rows.get(at).map(|r| (r.subject.clone(), r.depth));
        let again = on
            .filter(|_| at > 0 && self.page != Page::Stacks)
            .and_then(|(subject, depth)| {
                let same = |r: &Row| r.depth == depth && r.subject == subject;
                rows.iter().position(|r| subject != Subject::None && same(r))
            });
        self.rows = rows;
        self.select(again.unwrap_or(at));
    }

    fn select(&mut self, at: usize) {
        self.table.select(Some(at.min(self.rows.len().saturating_sub(1))));
    }

    fn go(&mut self, page: Page) {
        if page != self.page {
            self.back.push(std::mem::replace(&mut self.page, page));
            self.top();
        }
    }

    fn top(&mut self) {
        self.rows.clear();
        self.table = TableState::default().with_selected(Some(0));
        self.refresh();
    }

    /// Takes a key.
    pub fn key(&mut self, key: KeyEvent) -> Act {
        if key.kind == KeyEventKind::Release {
            return Act::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Act::Quit,
                _ => Act::Nothing,
            };
        }
        self.message.clear();
        if self.input.is_some() {
            return self.type_in(key.code);
        }
        if std::mem::take(&mut self.help) {
            return Act::Nothing; // any key closes it
        }
        let at = self.table.selected().unwrap_or(0);
        match key.code {
            KeyCode::Char('q') => return Act::Quit,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Up | KeyCode::Char('k') => self.select(at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(at + 1),
            KeyCode::PageUp => self.select(at.saturating_sub(self.page_rows)),
            KeyCode::PageDown => self.select(at + self.page_rows),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Char('1') => self.go(Page::Functions),
            KeyCode::Char('2') => self.go(Page::Stacks),
            KeyCode::Char('3') => {
                self.go(Page::Threads);
                return Act::Look;
            }
            KeyCode::Tab => {
                let next = match self.page {
                    Page::Functions => Page::Stacks,
                    Page::Stacks => Page::Threads,
                    Page::Threads | Page::Around(_) => Page::Functions,
                };
                self.go(next);
                return Act::Look;
            }
            KeyCode::Enter => return self.enter(at),
            KeyCode::Esc | KeyCode::Backspace => return self.leave(),
            KeyCode::Char('s') => {
                self.sort = match self.sort {
                    Sort::Own => Sort::Total,
                    Sort::Total => Sort::Name,
                    Sort::Name => Sort::Own,
                };
                self.refresh();
            }
            KeyCode::Char('/') => self.input = Some((Input::Filter, self.filter.clone())),
            KeyCode::Char('w') => {
                let pid = self.profile.meta.pid;
                self.input = Some((Input::Save, format!("nativeprof-{pid}.svg")));
            }
            KeyCode::Char('f' | ' ') => {
                self.frozen = !self.frozen;
                return Act::Look;
            }
            KeyCode::Char('a') => {
                self.thread = None;
                return Act::Look;
            }
            KeyCode::Char('+' | '=') => return self.widen(1),
            KeyCode::Char('-') => return self.widen(-1),
            _ => {}
        }
        Act::Nothing
    }

    fn widen(&mut self, by: isize) -> Act {
        let at = WINDOWS.iter().position(|w| *w == self.seconds).unwrap_or(0);
        self.seconds = WINDOWS[at.saturating_add_signed(by).min(WINDOWS.len() - 1)];
        Act::Look
    }

    fn enter(&mut self, at: usize) -> Act {
        match self.rows.get(at).map(|r| r.subject.clone()) {
            Some(Subject::Function(frame)) => self.go(Page::Around(frame)),
            Some(Subject::Thread(tid)) => {
                self.thread = Some(tid);
                self.go(Page::Functions);
                return Act::Look;
            }
            _ => {}
        }
        Act::Nothing
    }

    /// One step back: from a page, then from filter and thread.
    fn leave(&mut self) -> Act {
        if let Some(page) = self.back.pop() {
            self.page = page;
            self.top();
        } else if !self.filter.is_empty() {
            self.set_filter(String::new());
        } else {
            self.thread = None;
        }
        Act::Look
    }

    fn type_in(&mut self, code: KeyCode) -> Act {
        let Some((what, mut text)) = self.input.take() else {
            return Act::Nothing;
        };
        match code {
            KeyCode::Esc => return Act::Nothing,
            KeyCode::Enter => {
                return match what {
                    Input::Save if text.is_empty() => Act::Nothing,
                    Input::Save => Act::Save(text),
                    Input::Filter => {
                        self.set_filter(text);
                        Act::Nothing
                    }
                };
            }
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Char(c) if !c.is_control() && text.len() < MAX_INPUT => text.push(c),
            _ => {}
        }
        self.input = Some((what, text));
        Act::Nothing
    }

    fn set_filter(&mut self, text: String) {
        match RegexBuilder::new(&text)
            .case_insensitive(true)
            .size_limit(MAX_FILTER)
            .build()
        {
            Ok(filter) => {
                self.compiled = Some(filter).filter(|_| !text.is_empty());
                self.filter = text;
                self.top();
            }
            Err(_) => self.message = format!("not a regular expression: {text}"),
        }
    }
}

#[cfg(test)]
mod tests;
