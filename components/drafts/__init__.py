"""Drafting methods: how each drafts and learns, and how a drafter is trained and stored."""

from components.drafts.steps import add_suffix as add_suffix
from components.drafts.steps import import_draft as import_draft
from components.drafts.steps import quantise_draft as quantise_draft
from components.drafts.steps import train_draft as train_draft
