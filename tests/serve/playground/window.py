"""A process with one Chromium page and nothing else, for browser.py to drive: `python window.py`.

Prints the port of Chromium's debugging protocol's page once it is there; ends with its stdin.
"""

from __future__ import annotations

import sys
import threading

from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication


def main() -> None:
    app = QApplication(sys.argv)
    view = QWebEngineView()
    view.resize(1280, 900)
    view.loadFinished.connect(lambda loaded: print("here", flush=True))
    view.load(QUrl("about:blank"))
    view.show()

    def end_with_stdin() -> None:
        sys.stdin.read()
        app.quit()

    threading.Thread(target=end_with_stdin, daemon=True).start()
    app.exec()


if __name__ == "__main__":
    main()
