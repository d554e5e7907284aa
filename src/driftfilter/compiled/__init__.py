"""The step of small filters in compiled code; nothing above needs it."""
