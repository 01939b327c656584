//! A link to a server that is as bad as it is told to be.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Everything gets through.
    Good,
    /// Nothing does, and nobody is told.
    BlackHole,
    /// What the server says does not get through.
    HalfOpen,
    /// Everything comes so many milliseconds later.
    Delay(u64),
    /// So many bytes get through in a second.
    Throttle(u64),
}

#[derive(Debug)]
struct State {
    mood: Mood,
    open: Vec<TcpStream>,
    is_over: bool,
}

/// The link.
pub struct Link {
    /// Where a client finds it.
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl Link {
    /// A good one, to there.
    pub fn start(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let state = Arc::new(Mutex::new(State { mood: Mood::Good, open: Vec::new(), is_over: false }));
        let (of_link, to) = (Arc::clone(&state), to.to_owned());
        std::thread::spawn(move || {
            for near in listener.incoming() {
                // Without descriptors it would come round here for ever.
                let near = near.expect("a connection");
                if of_link.lock().expect("no panic").is_over {
                    return;
                }
                let Ok(far) = TcpStream::connect(&to) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().expect("cloned");
                of_link.lock().expect("no panic").open.extend([clone(&near), clone(&far)]);
                for (from, into, is_answer) in [(clone(&near), clone(&far), false), (far, near, true)] {
                    let state = Arc::clone(&of_link);
                    std::thread::spawn(move || pass_on(from, into, is_answer, &state));
                }
            }
        });
        Link { address, state }
    }

    /// From now on.
    pub fn set(&self, mood: Mood) {
        self.state.lock().expect("no panic").mood = mood;
    }

    /// Ends what there is, and is good for what comes.
    pub fn cut(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.mood = Mood::Good;
        for stream in state.open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// A long run has thousands of links: each takes its streams and its thread along.
impl Drop for Link {
    fn drop(&mut self) {
        self.cut();
        self.state.lock().expect("no panic").is_over = true;
        // Wakes whoever waits for a connection.
        let _ = TcpStream::connect(&self.address);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, is_answer: bool, state: &Mutex<State>) {
    let mut bytes = vec![0; 16 << 10];
    loop {
        let got = match from.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(got) => got,
        };
        let mood = state.lock().expect("no panic").mood;
        let is_lost = match mood {
            Mood::BlackHole => true,
            Mood::HalfOpen => is_answer,
            Mood::Delay(milliseconds) => {
                std::thread::sleep(Duration::from_millis(milliseconds));
                false
            }
            Mood::Throttle(bytes) => {
                std::thread::sleep(Duration::from_micros(got as u64 * 1_000_000 / bytes));
                false
            }
            Mood::Good => false,
        };
        // A stream with a gap would be another stream: what is lost once is lost to its end.
        if is_lost {
            // Until the link is over.
            while matches!(from.read(&mut bytes), Ok(1..)) {}
            return;
        }
        if to.write_all(&bytes[..got]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
