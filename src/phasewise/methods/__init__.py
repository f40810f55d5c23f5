"""Methods: one folder per verb, one file per method. The core never imports or names them."""
