//! State of the screen, and how keys change it. Draws nothing.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use regex_lite::{Regex, RegexBuilder};

use super::Windows;
use super::rows::{self, RowTarget, TopOrder, TopRow};
use crate::event::Tid;
use crate::export::select;
use crate::profile::lags::{self, Lag, LagSite};
use crate::profile::model::{Frame, Profile};
use crate::profile::values::ValueType;
use crate::profile::views::ViewOptions;
use crate::profile::waits::{self, WaitSite};

/// Letters of an input.
const MAX_INPUT: usize = 500;
/// Maximum size of a compiled filter, in bytes.
const MAX_FILTER: usize = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Page {
    #[default]
    Functions,
    Stacks,
    Threads,
    /// Where threads waited.
    Waits,
    /// What kept event loops for long, and the stack of one of those.
    Lags,
    Lag(Box<Lag>),
    /// Callers and callees of a function.
    CallersAndCallees(Box<Frame>),
}

/// What the user types a line for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompt {
    Filter,
    Save,
}

/// A line that the user types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    pub prompt: Prompt,
    pub text: String,
    /// The text is proposed: the first letter replaces it, and Backspace removes it.
    pub is_proposed: bool,
}

/// What the caller of [`App::key`] must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    Quit,
    /// Write what is shown to this path.
    Save(String),
    /// Read the samples again.
    Refresh,
}

pub struct App {
    pub page: Page,
    /// Pages that Esc leads back to.
    back: Vec<Page>,
    pub sort: TopOrder,
    windows: Windows,
    pub seconds: u64,
    pub frozen: bool,
    pub ended: bool,
    pub help: bool,
    pub thread: Option<Tid>,
    /// Threads that held the GIL when the screen was last refreshed.
    pub gil_holders: Vec<Tid>,
    pub input: Option<Input>,
    pub filter: String,
    compiled: Option<Regex>,
    pub message: String,
    /// What is left out of what is shown.
    pub view: ViewOptions,
    /// All that was sampled, to be saved.
    profile: Profile,
    shown: Profile,
    pub rows: Vec<TopRow>,
    /// Of the page of waits: one for each row.
    pub sites: Vec<WaitSite>,
    /// The same of the page of what blocked event loops.
    pub lag_sites: Vec<LagSite>,
    pub table: TableState,
    /// Rows that fit on the screen; set when it is drawn.
    pub page_rows: usize,
}

impl Default for App {
    fn default() -> App {
        App {
            page: Page::Functions,
            back: Vec::new(),
            sort: TopOrder::SelfCount,
            windows: Windows::default(),
            seconds: Windows::default().first,
            frozen: false,
            ended: false,
            help: false,
            thread: None,
            gil_holders: Vec::new(),
            input: None,
            filter: String::new(),
            compiled: None,
            message: String::new(),
            view: ViewOptions::default(),
            profile: Profile::default(),
            shown: Profile::default(),
            rows: Vec::new(),
            sites: Vec::new(),
            lag_sites: Vec::new(),
            table: TableState::default().with_selected(Some(0)),
            page_rows: 10,
        }
    }
}

impl App {
    /// With nothing to show yet.
    pub fn new(view: ViewOptions, windows: Windows) -> App {
        App {
            view,
            windows,
            seconds: windows.first,
            ..App::default()
        }
    }

    /// All that was sampled, whatever of it is shown.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The thread to show; `None` for all, as in the list of threads.
    pub fn wanted_thread(&self) -> Option<Tid> {
        self.thread.filter(|_| self.page != Page::Threads)
    }

    /// Shows other samples.
    pub fn show(&mut self, profile: Profile) {
        self.profile = profile;
        self.apply_view();
        self.refresh();
    }

    /// What amounts of rows are, and how much of it was sampled in all.
    pub fn value(&self) -> (&ValueType, u64) {
        let value = shown_value(&self.profile);
        (
            &self.profile.value_types()[value].kind,
            self.profile.total_amount(value),
        )
    }

    /// Applies the view to the samples.
    fn apply_view(&mut self) {
        let by_value = select::by_value(self.profile.clone(), shown_value(&self.profile));
        self.shown = self.view.apply(by_value).unwrap_or_else(|none| {
            // Its samples may come yet.
            self.message = format!("no samples of {} in this time", none.name);
            Profile {
                meta: self.profile.meta.clone(),
                ..Profile::default()
            }
        });
    }

    /// Rebuilds the rows; the selection stays on its row, unless that is gone or was at the top.
    fn refresh(&mut self) {
        let filter = self.compiled.as_ref();
        let rows = match &self.page {
            Page::Functions => rows::functions(&self.shown, filter, self.sort),
            Page::Stacks => rows::stacks(&self.shown, filter),
            Page::Threads => rows::threads(&self.shown, filter, self.sort, &self.gil_holders),
            Page::Waits => {
                self.sites = waiting(&self.shown, filter);
                rows::waits(&self.sites)
            }
            Page::Lags => {
                self.lag_sites = lags::sites(&self.profile.meta.lags);
                self.lag_sites
                    .retain(|site| filter.is_none_or(|f| f.is_match(&site.text())));
                self.lag_sites.truncate(rows::MAX_ROWS);
                rows::lags(&self.lag_sites)
            }
            Page::Lag(lag) => rows::lag_stack(lag),
            Page::CallersAndCallees(function) => rows::around(&self.shown, function, self.sort),
        };
        let at = self.table.selected().unwrap_or(0);
        let on = self.rows.get(at).map(|r| (r.target.clone(), r.depth));
        let again = on
            .filter(|_| at > 0 && self.page != Page::Stacks)
            .and_then(|(target, depth)| {
                let same = |r: &TopRow| r.depth == depth && r.target.is_same(&target);
                rows.iter().position(same)
            });
        self.rows = rows;
        self.select(again.unwrap_or(at));
    }

    fn select(&mut self, at: usize) {
        self.table.select(Some(at.min(self.rows.len().saturating_sub(1))));
    }

    fn open_page(&mut self, page: Page) {
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

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Action::Quit,
                _ => Action::Nothing,
            };
        }
        self.message.clear();
        if self.input.is_some() {
            return self.type_in(key.code);
        }
        if std::mem::take(&mut self.help) {
            return Action::Nothing; // any key closes it
        }
        let at = self.table.selected().unwrap_or(0);
        match key.code {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Up | KeyCode::Char('k') => self.select(at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(at + 1),
            KeyCode::PageUp => self.select(at.saturating_sub(self.page_rows)),
            KeyCode::PageDown => self.select(at + self.page_rows),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Char('1') => self.open_page(Page::Functions),
            KeyCode::Char('2') => self.open_page(Page::Stacks),
            KeyCode::Char('3') => {
                self.open_page(Page::Threads);
                return Action::Refresh;
            }
            KeyCode::Char('4') => self.open_page(Page::Waits),
            KeyCode::Char('5') => self.open_page(Page::Lags),
            KeyCode::Tab => {
                let next = match self.page {
                    Page::Functions => Page::Stacks,
                    Page::Stacks => Page::Threads,
                    Page::Threads => Page::Waits,
                    Page::Waits => Page::Lags,
                    Page::Lags | Page::Lag(_) | Page::CallersAndCallees(_) => Page::Functions,
                };
                self.open_page(next);
                return Action::Refresh;
            }
            KeyCode::Enter => return self.enter(at),
            KeyCode::Esc | KeyCode::Backspace => return self.leave(),
            KeyCode::Char('s') => {
                self.sort = match self.sort {
                    TopOrder::SelfCount => TopOrder::Total,
                    TopOrder::Total => TopOrder::Name,
                    TopOrder::Name => TopOrder::SelfCount,
                };
                self.refresh();
            }
            KeyCode::Char('/') => {
                self.input = Some(Input {
                    prompt: Prompt::Filter,
                    text: self.filter.clone(),
                    is_proposed: false,
                });
            }
            KeyCode::Char('w') => {
                let pid = self.profile.meta.pid;
                self.input = Some(Input {
                    prompt: Prompt::Save,
                    text: format!("nativeprof-{pid}.html"),
                    is_proposed: true,
                });
            }
            KeyCode::Char('f' | ' ') => {
                self.frozen = !self.frozen;
                return Action::Refresh;
            }
            KeyCode::Char('i') => {
                self.view.interpreter_frames = !self.view.interpreter_frames;
                self.apply_view();
                self.refresh();
            }
            KeyCode::Char('n') => {
                self.view.no_native = !self.view.no_native;
                self.apply_view();
                self.refresh();
            }
            KeyCode::Char('a') => {
                self.thread = None;
                return Action::Refresh;
            }
            KeyCode::Char('+' | '=') => return self.widen(1),
            KeyCode::Char('-') => return self.widen(-1),
            _ => {}
        }
        Action::Nothing
    }

    fn widen(&mut self, by: isize) -> Action {
        let windows = self.windows.seconds;
        let at = windows.iter().position(|w| *w == self.seconds).unwrap_or(0);
        let at = at.saturating_add_signed(by).min(windows.len().saturating_sub(1));
        self.seconds = windows.get(at).copied().unwrap_or(self.seconds);
        Action::Refresh
    }

    fn enter(&mut self, at: usize) -> Action {
        match self.rows.get(at).map(|r| r.target.clone()) {
            Some(RowTarget::Function(frame)) => self.open_page(Page::CallersAndCallees(frame)),
            Some(RowTarget::Lag(lag)) => self.open_page(Page::Lag(lag)),
            Some(RowTarget::Thread(tid)) => {
                self.thread = Some(tid);
                self.open_page(Page::Functions);
                return Action::Refresh;
            }
            _ => {}
        }
        Action::Nothing
    }

    /// One step back: from a page, then from filter and thread.
    fn leave(&mut self) -> Action {
        if let Some(page) = self.back.pop() {
            self.page = page;
            self.top();
        } else if !self.filter.is_empty() {
            self.set_filter(String::new());
        } else {
            self.thread = None;
        }
        Action::Refresh
    }

    fn type_in(&mut self, code: KeyCode) -> Action {
        let Some(Input {
            prompt,
            mut text,
            is_proposed,
        }) = self.input.take()
        else {
            return Action::Nothing;
        };
        match code {
            KeyCode::Esc => return Action::Nothing,
            KeyCode::Enter => {
                return match prompt {
                    Prompt::Save if text.is_empty() => Action::Nothing,
                    Prompt::Save => Action::Save(text),
                    Prompt::Filter => {
                        self.set_filter(text);
                        Action::Nothing
                    }
                };
            }
            KeyCode::Backspace if is_proposed => text.clear(),
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Char(c) if !c.is_control() && text.len() < MAX_INPUT => {
                if is_proposed {
                    text.clear();
                }
                text.push(c);
            }
            // The proposal is taken, to be changed at its end.
            _ => {}
        }
        self.input = Some(Input {
            prompt,
            text,
            is_proposed: false,
        });
        Action::Nothing
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
            Err(_) => self.message = format!("invalid regular expression: {text}"),
        }
    }
}

/// The value that rows have: of resident memory always what is still there, also while there is none.
fn shown_value(profile: &Profile) -> usize {
    let resident = profile.find_value(&ValueType::RSS_BYTES.name);
    resident.unwrap_or_else(|| profile.default_value())
}

/// Places where threads waited, longest total first; none where only CPU time is sampled.
fn waiting(profile: &Profile, filter: Option<&Regex>) -> Vec<WaitSite> {
    let value = profile.waiting_time();
    let mut sites = value.map_or_else(Vec::new, |value| waits::sites(profile, value));
    sites.retain(|site| filter.is_none_or(|f| f.is_match(&site.text())));
    sites.truncate(rows::MAX_ROWS);
    sites
}

#[cfg(test)]
mod tests;
