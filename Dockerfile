# A server of an exported model: docs/serving.md
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /src/
COPY loka_jax /src/loka_jax
COPY experiments /src/experiments
RUN pip install --no-cache-dir '/src[serve]'
EXPOSE 8000
ENTRYPOINT ["loka", "serve", "/model", "--host", "0.0.0.0"]
