import logging

from plsc.terminal import on_terminal

LOGGER = logging.getLogger("plsc.some.module")


def test_messages_go_to_the_terminal_by_their_level_and_without_secrets(capsys):
    with on_terminal() as terminal, on_terminal():
        terminal.wording = lambda text: text.replace("set_lr(1)", "--optim.lr 1")
        LOGGER.info("epoch 0 of s3://me:SECRET@bucket/run")
        LOGGER.warning("the loss increases: set_lr(1)")
        LOGGER.debug("nothing")
    printed = capsys.readouterr()
    assert printed.out == "epoch 0 of s3://bucket/run\n"
    assert printed.err == "plsc: warning: the loss increases: --optim.lr 1\n"
    LOGGER.info("the handler and the level are gone")
    assert not any(capsys.readouterr())


def test_a_root_handler_that_shows_warnings_alone_is_no_configuration(capsys):
    root = logging.getLogger()
    root.addHandler(handler := logging.NullHandler())
    try:
        with on_terminal():
            LOGGER.info("hello")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().out == "hello\n"


def test_where_the_user_has_configured_logging_the_terminal_is_left_to_him(messages, capsys):
    with on_terminal():
        LOGGER.info("hello")
    assert messages == ["hello"]
    assert not any(capsys.readouterr())
