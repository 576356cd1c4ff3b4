"""What people read: one self-contained page, Markdown tables, a summary in a few lines."""

from components.report.page import write_page

__all__ = ["write_page"]
