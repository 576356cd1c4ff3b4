"""Rules that drop or mend rows: encoding, repetition, language, personal data."""
